"""Two trainers in a row: GRPO goes on from the policy that RCE trained.

Shows how one trainer takes what another wrote: best/policy of a run is a model folder, as ACTOR_MODEL, for
trl or for transformers' from_pretrained().

Change: the two programs; ppo/sft.py before both, for example. SHARED has the arguments of both (the data, the
prompt), RCE those of rce.py alone (the model). Arguments of this program go to grpo.py.

    python examples/grpo_after_rce.py [KEY=VALUE ...]    # two minutes of one core; constants of grpo.py
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "checkpoints/grpo_after_rce"
SHARED = []  # such as "SYSTEM_PROMPT=Think step by step."
RCE = ["RESUME=yes"]  # and, for another model, "ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct"
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
            stop(f"{argument}: both programs must have it: put it into SHARED, or the model into RCE")


def stop(sentence):
    print(f"{Path(__file__).name}: {sentence}", file=sys.stderr)
    sys.exit(2)


def main():
    check_arguments(sys.argv[1:])
    run("rce/rce.py", *SHARED, *RCE, f"OUTPUT_DIR={FOLDER}/rce")
    actor = f"ACTOR_MODEL={FOLDER}/rce/best/policy"
    run("grpo/grpo.py", *SHARED, actor, f"OUTPUT_DIR={FOLDER}/grpo", *sys.argv[1:])


if __name__ == "__main__":
    main()
