"""DPO from candidates: mine responses with rce.py, make pairs of them, train on the pairs with dpo.py.

Runs three programs in a row, in this process: RCE's first stage samples candidates of each prompt and scores
them, tools/pairs.py takes the best and the worst of each prompt, and DPO trains on these pairs. No reward
model and no written answers are needed, only a reward that tells candidates apart.

Change: SHARED, the arguments of rce.py and dpo.py (the model, the prompt); MINE, those of rce.py (the reward,
the data, the number of candidates). Arguments of this program go to dpo.py. Candidates that are there already
are used again: to mine again, delete the folder.

    python examples/dpo_from_candidates.py [KEY=VALUE ...]    # a minute of one core; constants of dpo.py
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "checkpoints/dpo_from_candidates"
SHARED = []  # such as "ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct", or "SYSTEM_PROMPT=..."
MINE = ["STAGE=mine", "MINE_PROMPTS=640", "RESUME=yes"]


def run(script, *arguments):
    """Runs a program of the repository. A program that was stopped, or fails, ends this one, too."""
    sys.argv = [script, *arguments]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def main(arguments):
    candidates = FOLDER / "rce/candidates_round_1.parquet"
    pairs = FOLDER / "pairs.jsonl"
    columns = {"type": "jsonl", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    if not candidates.exists():
        run("rce/rce.py", *SHARED, *MINE, f"OUTPUT_DIR={FOLDER}/rce")
    run("tools/pairs.py", str(candidates), str(pairs))
    data = f"TRAIN_DATASETS={[{'path': str(pairs), **columns}]}"
    run("rce/dpo.py", *SHARED, data, f"OUTPUT_DIR={FOLDER}/dpo", *arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
