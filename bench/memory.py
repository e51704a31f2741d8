"""Memory: tools/memory.py's estimate beside what processes take, and what fits on which cards.

    python bench/memory.py measured     # tiny, 20M and (if bench/real.py made it) SmolLM2, on this processor
    python bench/memory.py cards        # the table of docs/your-model.md, from configs alone

measured: the peak of the resident memory of three training steps, GRPO and PPO. cards: the estimate for
models of Qwen2.5's shapes with 512 prompt and 512 response tokens, 8 prompts x 8 responses at a time,
bfloat16, MICRO_BATCH_ROWS=2 and GRADIENT_CHECKPOINTING, and the smallest card that holds it with a tenth
to spare.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from speed import ROOT, random_model

QWEN = {  # hidden size, layers, heads, key-value heads, feed-forward size, vocabulary, tied embeddings
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
}
MODES = {
    "whole model, 1 card": "",
    "LoRA, 1 card": "LORA_RANK=16",
    "FSDP2, 2 cards": "SHARD=fsdp2 PROCESSES=2",
    "FSDP2, 4 cards": "SHARD=fsdp2 PROCESSES=4",
    "FSDP2, 8 cards": "SHARD=fsdp2 PROCESSES=8",
}
CARDS = (8, 12, 16, 24, 40, 48, 80)  # GiB
CARD_WORDS = "MAX_PROMPT_TOKENS=512 MAX_NEW_TOKENS=512 BATCH_SIZE=8 GROUP_SIZE=8 REWARD_MODEL=None "
CARD_WORDS += "DTYPE=bfloat16 MICRO_BATCH_ROWS=2 GRADIENT_CHECKPOINTING=True"

spec = importlib.util.spec_from_file_location("memory_tool", ROOT / "tools/memory.py")
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)


def estimated(trainer, words):
    """Returns the estimate for a command line, in GiB."""
    constants = memory.override(memory.read_constants(ROOT / trainer), words)
    *always, rollout, update = memory.estimate(ROOT / trainer, constants).values()
    return (sum(always) + max(rollout, update)) / memory.GIB


def peak_of(trainer, words, folder):
    """Returns the peak memory of a process that trains three steps, in GiB."""
    quiet = "EVAL_EVERY_N_STEPS=0 MAX_EVAL_PROMPTS=4 SAVE_EVERY_N_STEPS=0 RESUME=no MAX_STEPS=3"
    command = [sys.executable, trainer, *words, *quiet.split(), f"OUTPUT_DIR={folder}"]
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=-3); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout) / 2**20


def measured():
    print(f"{'':28}{'estimate':>10}{'measured':>10}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        random_model(f"{folder}/20M", "20M")
        small = [f"ACTOR_MODEL={folder}/20M", "BATCH_SIZE=8", "REWARD_MODEL=None"]
        cases = {"tiny": [], "20M": small}
        smollm2 = ROOT / "data/real/smollm2"
        if smollm2.exists():
            cases["SmolLM2-135M"] = [f"ACTOR_MODEL={smollm2}", "BATCH_SIZE=4", "REWARD_MODEL=None"]
        for name, words in cases.items():
            for trainer in ("grpo/grpo.py", "ppo/ppo.py"):
                every_row = ["SKIP_FLAT_GROUPS=False"] if trainer == "grpo/grpo.py" else []
                guess = estimated(trainer, [*words, *every_row])
                took = peak_of(trainer, [*words, *every_row], f"{folder}/run")
                print(
                    f"{name + ', ' + trainer:28}{guess:7.2f} GiB{took:6.2f} GiB{guess / took:8.2f}",
                    flush=True,
                )


def cards():
    with tempfile.TemporaryDirectory() as folder:
        for size, (hidden, layers, heads, kv_heads, feed_forward, vocabulary, tied) in QWEN.items():
            config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": hidden}
            config |= {"num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary}
            config |= {"num_key_value_heads": kv_heads, "intermediate_size": feed_forward}
            config |= {"tie_word_embeddings": tied}
            os.mkdir(f"{folder}/{size}")
            Path(f"{folder}/{size}/config.json").write_text(json.dumps(config))
        print(f"| GiB per card (smallest card): GRPO / PPO | {' | '.join(QWEN)} |\n|---|{'---|' * len(QWEN)}")
        for mode, mode_words in MODES.items():
            cells = []
            for size in QWEN:
                words = [
                    f"ACTOR_MODEL={folder}/{size}",
                    "GPU_GIB=80",
                    *CARD_WORDS.split(),
                    *mode_words.split(),
                ]
                needs = [estimated(trainer, words) for trainer in ("grpo/grpo.py", "ppo/ppo.py")]
                cards = [next((c for c in CARDS if c >= 1.1 * need), "none") for need in needs]
                cells.append(" / ".join(f"{need:.0f} ({card})" for need, card in zip(needs, cards)))
            print(f"| {mode} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sections = {"measured": measured, "cards": cards}
    if sys.argv[1:] not in (["measured"], ["cards"]):
        sys.exit(__doc__)
    sections[sys.argv[1]]()
