"""Generated problems: reasoning-gym's tasks and their own scores (GRPO).

Replaces read_records(), which yields the records of a data set: here of a task of the package reasoning-gym,
which makes problems from a seed and scores responses. Each prompt is a chat with SHOWN answered problems
before the question. The reward function reads the column `entry` of its row. A question that is held out is
in no prompt of the training data.

Change: TASK, SETTINGS, the sizes, how a response's answer is found (here its last number).

It needs a model that reads English; the shipped policy does not learn it.

    pip install reasoning-gym
    python examples/reasoning_gym_tasks.py ACTOR_MODEL=HuggingFaceTB/SmolLM2-135M-Instruct BATCH_SIZE=8 \
        GROUP_SIZE=8 MAX_STEPS=30 MAX_EVAL_PROMPTS=64 EVAL_SAMPLES=1 MAX_NEW_TOKENS=16 LEARNING_RATE=1e-5
"""

import re
import sys
from pathlib import Path

import reasoning_gym

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

TASK = "chain_sum"
SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SHOWN = 4  # answered problems before each question

# "path" is the seed: item i of a seed is item i - 1 of the next, so the seeds lie far apart
DATA = {"type": "reasoning_gym", "input": "chat", "output": "answer"}
TRAIN = {"path": "0", "size": 3000, **DATA}
TEST = {"path": "1000000", "size": 64, **DATA}


def make_task(seed, size):
    return reasoning_gym.create_dataset(TASK, seed=int(seed), size=size, **SETTINGS)


def read_records(spec):
    """Yields the records of a data set, dicts by column."""
    held_out = {entry["question"] for entry in make_task(TEST["path"], TEST["size"])}
    shown = []
    for entry in make_task(2_000_000, 100 * SHOWN):
        if entry["question"] not in held_out and len(shown) < 2 * SHOWN:
            shown.append({"role": "user", "content": entry["question"]})
            shown.append({"role": "assistant", "content": entry["answer"]})
    for entry in make_task(spec["path"], spec["size"]):
        if spec["path"] == TEST["path"] or entry["question"] not in held_out:
            chat = [*shown, {"role": "user", "content": entry["question"]}]
            yield {"chat": chat, "answer": entry["answer"], "entry": entry}


def solved(prompts, responses, answers, entry):
    """Returns the task's own score of each response's last number, 0 to 1."""
    task = make_task(0, 1)
    numbers = [[None, *re.findall(r"-?\d+", response)][-1] for response in responses]
    return [task.score_answer(number, e) for number, e in zip(numbers, entry)]


grpo.read_records = read_records
grpo.TRAIN_DATASETS = [TRAIN]
grpo.EVAL_DATASETS = [TEST]
grpo.REWARD_FUNCTIONS = [(solved, 1.0)]
grpo.ACCURACY_FUNCTION = solved
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/reasoning_gym_tasks"

if __name__ == "__main__":
    grpo.train_main()
