"""GRPO with turns: a calculator answers the tiny policy's sums. The recipe of docs/cookbook.md, as a program.

python bench/calculator.py [KEY=VALUE ...]                  # any of grpo.py's constants
python bench/learning_curves.py bench/calculator.py 1 2 3   # three seeds side by side
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo


def calculator(messages, response, answer):
    """Each sum of a response with its result; a response without a sum is the answer, and the end."""
    results = []
    for a, sign, b in re.findall(r"^(\d+)([-+*])(\d+)=", response, re.MULTILINE):
        a, b = int(a), int(b)
        results.append(f"{a}{sign}{b}={ {'+': a + b, '-': a - b, '*': a * b}[sign] }")
    return "\n".join(results) or None


grpo.ENVIRONMENT = calculator

if __name__ == "__main__":
    grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/calculator"
    grpo.train_main()
