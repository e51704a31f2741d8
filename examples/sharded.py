"""A model that does not fit one GPU with its gradients and moments: FSDP2 around ppo.py, grpo.py or sft.py.

Each process keeps a part of all weights, gradients and AdamW's moments, 16 bytes per parameter. In the update
a layer is whole only while it is read. To sample and to score, one model at a time is whole in every process:
a GPU must hold 4 bytes per parameter of the largest model, and in bfloat16 2 more. The update reads each
response with its prompt, in one sequence, and recomputes activations (GRADIENT_CHECKPOINTING).

Checkpoints and best/ hold whole weights and moments: a run goes on with or without FSDP2 and on any number of
processes, up to rounding. It was tested with two processes on the CPU (torch 2.13), not on GPUs.

Change: which layers are sharded (load_model).

    torchrun --nproc_per_node=8 examples/sharded.py grpo/grpo.py ACTOR_MODEL=Qwen/Qwen2.5-7B-Instruct ...
"""

import importlib
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.generation import utils as generation
from transformers.modeling_layers import GradientCheckpointingLayer

sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))
module = importlib.import_module(Path(sys.argv[1]).stem)
trainer = next(x for name, x in vars(module).items() if name.endswith("Trainer"))
before = SimpleNamespace(**{**vars(trainer), **vars(module)})  # what is replaced below

# ---------------------------------------------------------------- models


def load_model(*arguments, is_trained=False, **options):
    """Reads a model into main memory, and keeps this process's part of each layer on the device. All weights
    are float32: FSDP2 wants one type in a layer."""
    if module.LORA_RANK:
        raise module.UserError("sharded.py needs LORA_RANK=0")
    model = before.load_model(*arguments, is_trained=True, **options)
    device = module.join_processes()
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for part in (*layers, model):
        fully_shard(part, mesh=init_device_mesh(device.type, (module.world_size,)))
        # Gradients are added up: the loss is already divided by the tokens of all processes
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    with torch.no_grad():  # FSDP2 takes what is called first for the whole model
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    # Critics and sft.py call the decoder alone: embeddings and head must be whole then
    model.get_decoder().register_forward_pre_hook(lambda *_: model.unshard())
    shard(model)
    return model.requires_grad_(is_trained)


def shard(model):
    model.reset_iter_state()
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)  # embeddings and head: after the backward pass


def run_whole(function, find_model):
    """Returns a function during which each process holds all weights of the model find_model(first argument),
    and reads it without waiting for the others."""

    def run(first, *others):
        model = find_model(first)
        model.set_reshard_after_forward(False)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.unshard()
        result = function(first, *others)
        shard(model)
        return result

    return run


# ---------------------------------------------------------------- the update


def cut(rows, size, filler):
    """Returns micro-batches of at most `size` rows, as many for each process: in each layer they wait
    for each other. A process without a row reads a filler, which adds nothing to the loss."""
    count = module.world_size * math.ceil(len(rows) / (module.world_size * size))
    rows = rows + [filler] * (count - len(rows))
    return [rows[len(rows) * i // count : len(rows) * (i + 1) // count] for i in range(count)]


def micro_batches(batch, rows, size):
    if not torch.is_grad_enabled():  # the model is whole
        return before.micro_batches(batch, rows, size)
    rows = sorted(rows.tolist(), key=lambda row: -batch.lengths[row])
    return list(map(torch.tensor, cut(rows, size, filler=len(batch.rows) - 1)))


def optimizer_step(self, batch, rows, *weights, **options):
    """Puts the filler behind the batch: a response of which no token counts. weights: of grpo.py."""
    fields = {name: x[:1] for name, x in vars(batch).items() if name != "reward_parts"}
    parts = {name: x[:1] for name, x in batch.reward_parts.items()}
    filler = SimpleNamespace(**fields, reward_parts=parts)
    filler.mask = torch.zeros_like(filler.mask)
    weights = [torch.cat([x, torch.zeros_like(x[:1])]) for x in weights]
    return before.optimizer_step(self, module.join([batch, filler]), rows, *weights, **options)


def cut_by_length(rows):  # of sft.py
    if not torch.is_grad_enabled():
        return before.cut_by_length(rows)
    rows = sorted(rows, key=lambda row: -len(row["ids"]))
    return cut(rows, module.BATCH_SIZE, filler={**rows[-1], "mask": [0] * len(rows[-1]["ids"])})


def clip_and_step(optimizers, sums, run):
    """As in the trainer, where FSDP2 has added up the gradients; a norm is that of all parts."""
    metrics = module.Counter()
    for other_sums in module.all_gather({name: x.item() for name, x in sums.items()}):
        metrics.update(other_sums)  # adds
    for name, optimizer in optimizers.items():
        parameters = optimizer.param_groups[0]["params"]
        norm = torch.nn.utils.clip_grad_norm_(parameters, module.MAX_GRAD_NORM)
        metrics[f"{name}_grad_norm"] = norm.full_tensor().item()
    is_finite = all(map(math.isfinite, metrics.values()))
    for optimizer in optimizers.values():
        if is_finite:
            optimizer.step()
        optimizer.zero_grad()
    if not is_finite:
        run.log("WARNING: skipped an optimizer step that is not finite")
    return metrics


# ---------------------------------------------------------------- checkpoints


@torch.no_grad()
def full(value):
    """Returns a tensor or a dict of tensors, whole, on the CPU of process 0. All processes must call it."""
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        value = value.full_tensor()
        value = value.cpu() if module.rank == 0 else None
    return value


def full_weights(model):
    parameters = model.state_dict(keep_vars=True)
    tensors = {x: full(x) for x in dict.fromkeys(parameters.values())}  # tied weights stay one tensor
    return {name: tensors[x] for name, x in parameters.items()}


def trained_names(self):
    for model in self.models.values():
        model.state_dict()  # FSDP2 then has its sharded parameters, which are the optimizer's
    return before.trained_names(self)


def save_full(save):
    """Returns save() or save_best() of a trainer, in which process 0 alone would ask for the weights."""

    def run(self):
        kept = dict(vars(self))
        trained = self.trained_names()
        self.trained_names = lambda: trained
        self.models, self.optimizers = {}, {}
        for name, model in kept["models"].items():
            save_pretrained = partial(model.save_pretrained, state_dict=full_weights(model))
            self.models[name] = SimpleNamespace(save_pretrained=save_pretrained)
        for name, optimizer in kept["optimizers"].items():
            self.optimizers[name] = SimpleNamespace(state_dict=full(optimizer.state_dict()).copy)
        self.actor = self.models["policy"]
        save(self)
        del self.trained_names
        vars(self).update(kept)

    return run


def make_optimizer(model, learning_rate):
    optimizer = before.make_optimizer(model, learning_rate)
    optimizer.register_load_state_dict_pre_hook(shard_moments)
    return optimizer


def shard_moments(optimizer, saved):
    """Keeps this process's part of each moment of a checkpoint."""
    for parameter, state in zip(optimizer.param_groups[0]["params"], saved["state"].values()):
        for name, x in state.items():
            if x.shape == parameter.shape:
                x = x.to(parameter.device)
                mesh, placements = parameter.device_mesh, parameter.placements
                state[name] = distribute_tensor(x, mesh, placements, src_data_rank=None)


# ---------------------------------------------------------------- what replaces what

for function in (load_model, make_optimizer, clip_and_step, micro_batches, cut_by_length):
    setattr(module, function.__name__, function)
module.CUDA_GRAPHS = False  # FSDP2 waits for events in its hooks
trainer.trained_names = trained_names
trainer.save, trainer.save_best = save_full(trainer.save), save_full(trainer.save_best)
if trainer.__name__ == "SFTTrainer":
    trainer.evaluate = run_whole(trainer.evaluate, lambda self: self.actor)
    generation.is_fsdp_managed_module = lambda model: False  # so that generate() waits for no other process
else:
    trainer.optimizer_step = optimizer_step
    trainer.respond = run_whole(trainer.respond, lambda self: self.actor)
    trainer.reward_model_score = run_whole(trainer.reward_model_score, lambda self: self.reward_model)
    for name in {"all_logprobs", "in_micro_batches"} & vars(module).keys():
        setattr(module, name, run_whole(getattr(module, name), lambda model: model))

if __name__ == "__main__":
    if module.world_size == 1:
        sys.exit("sharded.py: start it by torchrun --nproc_per_node=N, with N of at least 2")
    sys.argv = [*sys.argv[1:], "GRADIENT_CHECKPOINTING=True"]
    module.train_main()
