"""A reward for lists of unlike items (generative recommendation, GRPO).

Shows a reward that looks at the whole list. The GROUP_SIZE candidates of a history are neighbours in what a
reward function is given. Here an item earns 1 minus the share of the other candidates that have its first
code, which is the broadest group of INDEX_FILE: of 16 items of one group each earns 0, of 16 groups 1.

Change: diversity(), or its weight, 0.3. Look at coverage@10 beside reward and ndcg@10 in logs/metrics.jsonl.

    python examples/rec_diversity.py [KEY=VALUE ...]    # minutes on one core; grpo_rec.py's constants
"""

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo_rec


@cache
def first_codes(path):
    """Returns {item: its first code} of an INDEX_FILE."""
    index = json.loads(Path(path).read_text("utf-8-sig"))
    return {item: codes[0] for item, codes in index.items()}


def diversity(histories, items, targets):
    """Returns the share of each item's neighbours in its list that are of another group."""
    group_of = first_codes(grpo_rec.INDEX_FILE)
    others = grpo_rec.GROUP_SIZE - 1
    scores = []
    for begin in range(0, len(items), grpo_rec.GROUP_SIZE):
        groups = [group_of[item] for item in items[begin : begin + grpo_rec.GROUP_SIZE]]
        count = Counter(groups)
        scores += [1 - (count[group] - 1) / others for group in groups]
    return scores


grpo_rec.REWARD_FUNCTIONS = [(diversity, 0.3)]
grpo_rec.OUTPUT_DIR = f"{grpo_rec.ROOT}/checkpoints/rec_diversity"

if __name__ == "__main__":
    grpo_rec.train_main()
