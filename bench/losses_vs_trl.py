"""The loss of each LOSS_TYPE of GRPO on the same float64 tensors, ours and trl 1.16.0's; then the loss and
the moves of the weights in one optimizer step of SFT, reward model and DPO on the same rows. Needs trl, in an
environment of its own:

    python -m venv .venv-trl
    .venv-trl/bin/pip install -r bench/requirements-trl.txt
    .venv-trl/bin/python bench/losses_vs_trl.py
"""

import importlib.util
import json
import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOW = 0.2  # CLIP_RANGE
HIGH = 0.3  # CLIP_RANGE_HIGH
LENGTH = 20  # MAX_NEW_TOKENS
ROWS = 8  # of the optimizer step
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: both sides compute on the CPU


def load_script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def no_reward(completions, **_):
    return [0.0] * len(completions)


def make_trl(loss_type, dual, rows):
    """trl's trainer with that loss, and its model in float64."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows,
        num_generations=rows,
        max_completion_length=LENGTH,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        loss_type="grpo" if loss_type == "gspo" else loss_type,
        importance_sampling_level="sequence" if loss_type == "gspo" else "token",
        epsilon=LOW,
        epsilon_high=1 + HIGH if loss_type == "cispo" else HIGH,
        delta=dual,
        report_to=[],
        gradient_checkpointing=False,
    )
    model = AutoModelForCausalLM.from_pretrained(ROOT / "data/tiny/policy", dtype=torch.float64)
    trainer = GRPOTrainer(
        model,
        no_reward,
        config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * rows}),
        processing_class=AutoTokenizer.from_pretrained(ROOT / "data/tiny/policy", padding_side="left"),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer, model


def compare_losses():
    grpo = load_script("grpo/grpo.py")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    rows = 6
    width = 12
    prompt = torch.randint(3, 80, (rows, 9))
    ids = torch.randint(3, 80, (rows, width))
    mask = (torch.arange(width) < torch.tensor([12, 1, 5, 8, 3, 12])[:, None]).double()
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, -0.7, 1.5]).double()
    noise = 0.5 * torch.randn(rows, width).double()
    prompt_mask = torch.ones_like(prompt)
    print("loss type   dual clip        ours         trl   difference")
    for loss_type in ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"):
        for dual in (None, 1.4):
            if loss_type in ("cispo", "sapo") and dual:
                continue  # neither has one
            trl, model = make_trl(loss_type, dual, rows)
            model.eval()
            with torch.no_grad():
                whole = torch.cat([prompt, ids], 1)
                whole_mask = torch.cat([prompt_mask, mask.long()], 1)
                logprobs, *_ = trl._get_per_token_logps_and_entropies(model, whole, whole_mask, width)
                old_logprobs = logprobs - noise
                inputs = {
                    "prompt_ids": prompt,
                    "prompt_mask": prompt_mask,
                    "completion_ids": ids,
                    "completion_mask": mask.long(),
                    "advantages": advantages,
                    "old_per_token_logps": old_logprobs,
                    "num_items_in_batch": mask.sum(),
                }
                model.train()  # trl normalises otherwise in evaluation; the model has no dropout
                theirs = trl._compute_loss(model, inputs).item()
                losses, _ = grpo.policy_loss(
                    logprobs, old_logprobs, advantages[:, None], mask, loss_type, LOW, HIGH, dual
                )
                ours = (losses * grpo.token_weights(mask, loss_type, LENGTH)).sum().item()
            difference = abs(ours - theirs)
            print(f"{loss_type:>9} {dual!s:>11} {ours:11.7f} {theirs:11.7f}    {difference:.1e}")
            assert difference < 1e-6, loss_type


def read_rows(name):
    lines = (ROOT / "data/tiny" / name).read_text().splitlines()[:ROWS]
    return [json.loads(line) for line in lines]


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def trl_settings(config_class, **more):
    """One step on all rows by AdamW, as ours."""
    return config_class(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        max_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        bf16=False,
        use_cpu=True,
        max_length=512,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **more,
    )


def our_step(path, name, trainer_class, **constants):
    """Loss and weights of one step of a trainer of ours."""
    script = load_script(path)
    settings = {"BATCH_SIZE": 4, "GRADIENT_ACCUMULATION_STEPS": ROWS // 4, "LEARNING_RATE": 1e-3}
    settings |= {"USE_LR_SCHEDULER": False, "WARMUP_STEPS": 0, "EVAL_DATASETS": [], "RESUME": "no"}
    settings |= {"OUTPUT_DIR": tempfile.mkdtemp(), name: ROWS, **constants}
    for key, value in settings.items():
        assert key in script.constants(), key
        setattr(script, key, value)
    trainer = getattr(script, trainer_class)()
    (model,) = trainer.models.values()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loss = trainer.update(trainer.train_rows)["loss"]
    return loss, before, model.state_dict()


def compare_step(label, ours, trl):
    """Compares our step with that of a trainer of trl. The moves of the weights are compared by their
    distance in parts of their length: AdamW's first step is near the sign of a gradient, also of one near
    0."""
    import torch

    trl.train()
    theirs = trl.state.log_history[0]["loss"]
    loss, before, after = ours
    other = trl.model.state_dict()
    moves = torch.cat([(after[key] - before[key]).flatten() for key in before])
    their_moves = torch.cat([(other[key].cpu() - before[key]).flatten() for key in before])
    distance = ((moves - their_moves).norm() / their_moves.norm()).item()
    print(f"{label:>20} {loss:11.7f} {theirs:11.7f}    {abs(loss - theirs):.1e}   {distance:.1e}")
    assert abs(loss - theirs) < 1e-5 and distance < 1e-3, label


def compare_steps():
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    policy = str(ROOT / "data/tiny/policy")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    print("one step of              ours         trl   difference  distance of moves")
    demonstrations = read_rows("demonstrations.jsonl")
    records = [{"prompt": user(r["problem"]), "completion": assistant(r["solution"])} for r in demonstrations]
    model = AutoModelForCausalLM.from_pretrained(policy)
    options = {"train_dataset": Dataset.from_list(records), "processing_class": tokenizer}
    trl = SFTTrainer(model, trl_settings(SFTConfig), **options)
    compare_step("SFT", our_step("ppo/sft.py", "MAX_TRAIN_PROMPTS", "SFTTrainer"), trl)

    margins = [0.5 * (i % 3) for i in range(ROWS)]
    records = [{**r, "margin": m} for r, m in zip(read_rows("pairs.jsonl"), margins)]
    folder = Path(tempfile.mkdtemp())
    (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    names = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    data = {"path": str(folder / "pairs.jsonl"), "type": "jsonl", **names}
    chats = []
    for r in records:
        answers = {key: assistant(r[key]) for key in ("chosen", "rejected")}
        chats.append({"prompt": user(r["prompt"]), **answers, "margin": r["margin"]})
    base = str(ROOT / "data/tiny/reward_model")
    constants = {"TRAIN_DATASETS": [{**data, "margin": "margin"}], "BASE_MODEL": base, "CENTER_COEF": 0.01}
    ours = our_step("ppo/reward_model.py", "MAX_TRAIN_PAIRS", "RewardModelTrainer", **constants)
    model = AutoModelForSequenceClassification.from_pretrained(base)
    options = {"train_dataset": Dataset.from_list(chats), "processing_class": tokenizer}
    trl = RewardTrainer(model, trl_settings(RewardConfig, center_rewards_coefficient=0.01), **options)
    compare_step("reward model", ours, trl)

    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    reference.save_pretrained(folder / "reference")
    for chat in chats:
        del chat["margin"]
    for loss_type, kind in (("dpo", "sigmoid"), ("ipo", "ipo")):  # trl has no label smoothing of "sigmoid"
        constants = {"TRAIN_DATASETS": [data], "REFERENCE_MODEL": str(folder / "reference")}
        constants |= {"LOSS_TYPE": loss_type, "BETA": 0.1, "ACCURACY_FUNCTION": None}
        ours = our_step("rce/dpo.py", "MAX_TRAIN_PAIRS", "DPOTrainer", **constants)
        model = AutoModelForCausalLM.from_pretrained(policy)
        reference = AutoModelForCausalLM.from_pretrained(folder / "reference")
        settings = trl_settings(DPOConfig, loss_type=[kind], beta=0.1)
        options = {"train_dataset": Dataset.from_list(chats), "processing_class": tokenizer}
        compare_step(loss_type.upper(), ours, DPOTrainer(model, reference, settings, **options))


if __name__ == "__main__":
    compare_losses()
    compare_steps()
