"""A reward of your own: functions that see responses and return one number for each (GRPO).

Adds two functions to those of REWARD_FUNCTIONS, by default `exact_answer` of rewards/. A function gets three
lists of one length: prompts, responses (texts) and answers (None where the data has none). The score is the
sum of weight * value. The mean of each function is logged under its name. A function of weight 0 is only
logged: it is a metric.

Change: the functions and their weights. A further parameter of a function gets the column of the data that
has its name, or `response_ids`, the token ids. For a function that waits for a server see judge.py.

    python examples/own_reward.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import operator
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def right_steps(prompts, responses, answers):
    """Returns the fraction of a response's lines a+b=c that are true, 0 if it has none."""
    values = []
    for response in responses:
        steps = re.findall(r"^(\d+)([-+*])(\d+)=(\d+)$", response, re.MULTILINE)
        right = [OPERATORS[sign](int(a), int(b)) == int(c) for a, sign, b, c in steps]
        values.append(sum(right) / max(1, len(right)))
    return values


def as_many_lines(prompts, responses, answers, solution):
    """Returns 1 for a response with as many lines as the data's column `solution`, else 0."""
    return [float(r.count("\n") == s.count("\n")) for r, s in zip(responses, solution)]


class OwnRewardTrainer(grpo.GRPOTrainer):
    def __init__(self, resume_from_checkpoint=None):
        super().__init__(resume_from_checkpoint)
        # Here the arguments have been read: no recipe removes what is added
        self.reward_functions.append(("right_steps", right_steps, 0.3))
        self.reward_functions.append(("as_many_lines", as_many_lines, 0.0))


grpo.GRPOTrainer = OwnRewardTrainer
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/own_reward"

if __name__ == "__main__":
    grpo.train_main()
