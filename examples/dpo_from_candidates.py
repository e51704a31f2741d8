"""DPO from candidates: mine responses with rce.py, make pairs of them, train on the pairs with dpo.py.

Shows three programs in a row: RCE's first stage samples candidates of each prompt and scores them,
tools/pairs.py takes the best and the worst of each prompt, and DPO trains on these pairs. No reward model and
no written answers are needed, only a reward that tells candidates apart.

Change: SHARED, the arguments of both programs (the model, the prompts); MINE, those of rce.py (the reward,
the number of prompts and candidates). Arguments of this program go to dpo.py. Candidates that are there
already are used again: to mine anew, delete the folder.

Run (seed 1, 640 prompts, 20 steps of DPO, 86 s of one core): 22% of sampled answers right before, 74% after.

    python examples/dpo_from_candidates.py [KEY=VALUE ...]    # a minute of one core; constants of dpo.py
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "checkpoints/dpo_from_candidates"
SHARED = []  # such as "ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct", or SYSTEM_PROMPT=...
MINE = ["STAGE=mine", "ROUNDS=1", "MINE_PROMPTS=640", "RESUME=yes"]
SAME = ("ACTOR_MODEL", "TRAIN_DATASETS", "PROMPT_TEMPLATE", "SYSTEM_PROMPT")


def run(script, *arguments):
    """Runs a program of the repository, and ends with its exit code if that is not 0. Ctrl-C reaches the
    program by itself, and SIGTERM is handed on: it saves, and then both end."""
    child = subprocess.Popen([sys.executable, str(ROOT / script), *arguments])
    handlers = {signal.SIGINT: lambda number, frame: None, signal.SIGTERM: lambda *_: child.terminate()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if code:
        sys.exit(code)


def check_arguments(arguments):
    """Refuses what must be the same in both programs, and several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        stop("it starts two programs in a row: start each of them by torchrun instead")
    for argument in arguments:
        if argument.partition("=")[0] in SAME:
            stop(f"{argument}: both programs must have it: put it into SHARED")


def stop(sentence):
    print(f"{Path(__file__).name}: {sentence}", file=sys.stderr)
    sys.exit(2)


def main():
    check_arguments(sys.argv[1:])
    candidates = FOLDER / "rce/candidates_round_1.parquet"
    pairs = FOLDER / "pairs.jsonl"
    if not candidates.exists():
        run("rce/rce.py", *SHARED, *MINE, f"OUTPUT_DIR={FOLDER}/rce")
    run("tools/pairs.py", str(candidates), str(pairs))
    columns = {"type": "jsonl", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    data = f"TRAIN_DATASETS={[{'path': str(pairs), **columns}]}"
    run("rce/dpo.py", *SHARED, data, f"OUTPUT_DIR={FOLDER}/dpo", *sys.argv[1:])


if __name__ == "__main__":
    main()
