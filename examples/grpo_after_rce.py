"""Two trainers in a row: GRPO goes on from the policy that RCE trained.

Shows how one trainer takes what another wrote: best/policy of a run is a model folder, as ACTOR_MODEL, for
trl or for transformers' from_pretrained().

Change: the two programs; ppo/sft.py before both, for example. Arguments of this program go to grpo.py.

    python examples/grpo_after_rce.py [KEY=VALUE ...]    # two minutes of one core; constants of grpo.py
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "checkpoints/grpo_after_rce"
RCE = ["RESUME=yes"]


def run(script, *arguments):
    """Runs a program of the repository, and ends with its exit code if that is not 0."""
    code = subprocess.run([sys.executable, str(ROOT / script), *arguments]).returncode
    if code:
        sys.exit(code)


def main():
    run("rce/rce.py", *RCE, f"OUTPUT_DIR={FOLDER}/rce")
    actor = f"ACTOR_MODEL={FOLDER}/rce/best/policy"
    run("grpo/grpo.py", actor, f"OUTPUT_DIR={FOLDER}/grpo", *sys.argv[1:])


if __name__ == "__main__":
    main()
