"""An environment with turns: a calculator answers the policy (GRPO).

Shows a response that is a conversation. After each of the policy's turns that ended in EOS,
ENVIRONMENT(messages, response, answer) returns the text of the next turn, or None at the end of the episode.
`messages` is the conversation before `response`; `answer` is None where the data has none. Only the policy's
own tokens are trained. Reward functions get the last turn as the response, and all turns by a parameter
`turns`. logs/samples.jsonl holds every turn; the metrics `turns` and `environment_tokens` count them.

Change: the function, MAX_TURNS, MAX_CONTEXT_TOKENS, ENVIRONMENT_ROLE (user or tool). A function that waits
for a sandbox or a server wants ENVIRONMENT_THREADS. A run is exact, resumed or on several processes, if the
function always answers alike and draws no random numbers of torch, numpy or random.

    python examples/turns.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
    python bench/learning_curves.py examples/turns.py 1 2 3                        # three seeds side by side
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo


def calculator(messages, response, answer):
    """Returns the results of a response's sums, one per line; None for a response without a sum."""
    results = []
    for a, sign, b in re.findall(r"^(\d+)([-+*])(\d+)=", response, re.MULTILINE):
        a, b = int(a), int(b)
        results.append(f"{a}{sign}{b}={ {'+': a + b, '-': a - b, '*': a * b}[sign] }")
    return "\n".join(results) or None


grpo.ENVIRONMENT = calculator
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/turns"

if __name__ == "__main__":
    grpo.train_main()
