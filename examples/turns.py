"""A conversation of several turns: a tutor asks again after a wrong answer (GRPO).

Overrides respond(). Whenever the policy ends a turn, reply() returns what the environment says, or None at
the end of the conversation. One row of the batch holds a whole conversation of at most MAX_NEW_TOKENS tokens.
Tokens that the policy did not write have mask 0, and are not trained. Reward functions get the whole
conversation as the response: exact_answer reads its last answer.

Change: reply(), MAX_TURNS, MAX_NEW_TOKENS. schema_tools.py is an environment of tools. To interrupt the
policy within a turn, add a token to self.end_ids around super().respond(). The class works with ppo.py, too.

    python examples/turns.py [KEY=VALUE ...]    # two minutes of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch
from rewards import exact_answer

MAX_TURNS = 3  # of the policy
ASK_AGAIN = " How many are there now?"
TOKEN_FIELDS = ("ids", "mask", "logprobs", "entropies")  # of a batch, (rows, R)


class TurnsTrainer(grpo.GRPOTrainer):
    role = "user"  # of the environment, in the chat template

    def reply(self, row, text):
        """Returns the environment's reply to the policy's turn `text`, or None at the end."""
        if row["answer"] is None or exact_answer([row["prompt"]], [text], [row["answer"]]) == [1.0]:
            return None
        return ASK_AGAIN

    def reply_ids(self, reply):
        """Returns the ids of a reply: all between the end of the policy's turn and its next turn."""
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "RESPONSE"}]
        messages.append({"role": self.role, "content": reply})
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = self.tokenizer(text.partition("RESPONSE")[2], add_special_tokens=False)["input_ids"]
        end = next(i for i, token in enumerate(ids) if token in self.end_ids)  # the policy wrote it
        return ids[end + 1 :]

    def respond(self, rows, uniform):
        batch = super().respond(rows, uniform)
        texts = dict(enumerate(batch.texts))  # the last turn of each conversation that may go on
        for _ in range(MAX_TURNS - 1):
            for i, text in list(texts.items()):
                if not self.add_reply(batch, i, text):
                    del texts[i]
            if not texts:
                break
            lengths = batch.lengths[list(texts)].tolist()
            prompts = [{"ids": rows[i]["ids"] + batch.ids[i, :n].tolist()} for i, n in zip(texts, lengths)]
            numbers = uniform
            if uniform is not None:  # each position of a conversation has its number
                numbers = torch.stack([uniform[i].roll(-n) for i, n in zip(texts, lengths)])
            turn = super().respond(prompts, numbers)
            for k, i in enumerate(texts):
                self.add_turn(batch, i, turn, k)
            texts = dict(zip(texts, turn.texts))
        batch.response_ids = [ids[:n] for ids, n in zip(batch.ids.tolist(), batch.lengths.tolist())]
        batch.texts = []
        for ids, is_cut in zip(batch.response_ids, batch.truncated):
            batch.texts.append(self.tokenizer.decode(ids if is_cut else ids[:-1]))
        return batch

    def add_reply(self, batch, i, text):
        """Appends the reply to conversation i. Returns whether there is one, and room for another turn."""
        reply = None if batch.truncated[i] else self.reply(batch.rows[i], text)
        if reply is None:
            return False
        ids = self.reply_ids(reply)
        start, end = batch.lengths[i], batch.lengths[i] + len(ids)
        if end >= batch.ids.shape[1]:
            return False
        batch.ids[i, start:end] = torch.tensor(ids)  # mask, logprobs and entropies are 0 there
        batch.lengths[i] = end
        return True

    def add_turn(self, batch, i, turn, k):
        """Appends row k of `turn`, as far as there is room, to conversation i."""
        start = batch.lengths[i]
        end = (start + turn.lengths[k]).clamp(max=batch.ids.shape[1])
        for name in TOKEN_FIELDS:
            vars(batch)[name][i, start:end] = vars(turn)[name][k, : end - start]
        batch.truncated[i] = turn.truncated[k] or end - start < turn.lengths[k]
        batch.lengths[i] = end


if __name__ == "__main__":
    grpo.GRPOTrainer = TurnsTrainer
    grpo.MAX_NEW_TOKENS = 128
    grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/turns"
    grpo.train_main()
