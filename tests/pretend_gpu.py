"""A GPU on a machine without one: tensors of cuda:0 in the CPU's memory, for a CPU build of PyTorch.

    python tests/pretend_gpu.py ppo/ppo.py KEY=VALUE ...  # run a program; then, what it asked of the device
    LOG=found.json python tests/pretend_gpu.py ...        # write that to a file instead

A DLPack capsule says on which device its tensor lies: altered, the same bytes are a plain tensor of cuda:0.
For these a CPU build has no kernels. The ones below check their arguments as a GPU's do and let the CPU's
work: everything else (views, autograd, autocast, optimizers, saving) is PyTorch's own. What happened is
counted in LOG, each with the line of this repository that did it:

    mix        CPU and device tensors, or a CPU generator, in one operation: raises, as on a GPU
    missing    a product of whole numbers, for which CUDA has no kernel: raises
    down, up   a copy to the CPU (.item(), .tolist(), .cpu()) or from it (.to(device)): the host waits, but
               for one from it with non_blocking=True, which counts as a kernel
    inside     an operation that asks the device how large its result is: the host waits
    kernel     anything else that the device is to do; one each, so this is a lower bound
    random     the device's own generator was drawn from
    other      a GPU beside the first was asked for its generator
    host       a language model, or other PreTrainedModel, that runs on the CPU
    unit       token: a forward pass of one token a row; backward: a backward pass; step: an optimizer's

Numbers are the CPU's to the bit. One device, no streams, no memory limit, no times, no NCCL: docs/lab/gpu.md.
"""

import collections
import ctypes
import functools
import json
import os
import re
import sys
import types
from pathlib import Path

import torch
import torchgen
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[1]
LOG = collections.Counter()  # {(kind, what, phase, line): how often}
LAST = [None, "else"]  # the last frame that did something, and its phase
# Of the functions that a line was called by the outermost of these is its phase
PHASES = (
    "check_models",
    "evaluate",
    "rollout",
    "score",
    "compute_advantages",
    "update",
    "record",
    "save",
    "mine",
    "load_checkpoint",
    "baselines",
)
WAITS = ("down", "up", "inside")
MEMORY = 2**30  # bytes: a sixteenth is what micro-batches are cut by on the CPU, too
HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# Operations that wait for the device (aten/src/ATen/native/cuda), beside copies and masks as indices
WAITS_INSIDE = {
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}
INDEXING = {"index", "_unsafe_index", "_index_put_impl_"}  # their indices may be on the CPU
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}


# ---------------------------------------------------------------- what happened, and which line did it


@functools.cache
def is_ours(file):
    return file.startswith(f"{ROOT}/") and file != __file__ and "site-packages" not in file


def note(kind, what):
    frame = sys._getframe(1)
    while frame and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not LAST[0]:  # while a function runs, those that called it do
        LAST[:] = frame, phase_of(frame)
    code = frame and frame.f_code
    line = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}".removeprefix(f"{ROOT}/") if code else ""
    LOG[kind, what, LAST[1], line] += 1


def phase_of(frame):
    phase = "else"
    while frame:
        if frame.f_code.co_name in PHASES and is_ours(frame.f_code.co_filename):
            phase = frame.f_code.co_name
        frame = frame.f_back
    return phase


def refuse(kind, what):
    note(kind, what)
    raise RuntimeError(f"the pretended GPU refuses ({kind}): {what}")


# ---------------------------------------------------------------- one memory, two devices


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


CPU, CUDA = 1, 2  # DLPack's numbers
address_in = ctypes.pythonapi.PyCapsule_GetPointer
address_in.restype = ctypes.c_void_p
address_in.argtypes = [ctypes.py_object, ctypes.c_char_p]


def relabel(tensor, device):
    """The same memory as a tensor of the other device."""
    capsule = torch._C._to_dlpack(tensor)
    DLTensor.from_address(address_in(capsule, b"dltensor")).device_type = device
    return torch._C._from_dlpack(capsule)


def storage_clone(storage):
    """UntypedStorage.clone(), which copy.deepcopy() calls."""
    copied = torch.UntypedStorage(storage.size()).copy_(storage)
    on_cpu = torch.empty(0, dtype=torch.uint8).set_(copied)
    return (on_cpu if storage.device.type == "cpu" else relabel(on_cpu, CUDA)).untyped_storage()


# ---------------------------------------------------------------- kernels


def tensors_in(value):
    values = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in values if isinstance(x, torch.Tensor)]


class Kernel:
    """The CUDA kernel of one operation: a call checks, counts and lets the CPU's kernel work."""

    def __init__(self, op, takes_numbers):
        arguments = op._schema.arguments
        returned = [x.alias_info for x in op._schema.returns]
        self.op = op
        self.name = op._schema.name.removeprefix("aten::")
        self.names = [x.name for x in arguments]
        self.single = {x.name for x in arguments if str(x.type) == "Tensor"}
        self.written = {x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write}
        self.is_view = self.name == "set_" or any(x is not None and not x.is_write for x in returned)
        self.takes_numbers = takes_numbers  # of the CPU: tensors without dimensions

    def __call__(self, *args, **kwargs):
        if self.is_view:  # no memory is read: the CPU's kernel takes a tensor of any device
            return self.op.redispatch(HOST, *args, **kwargs)
        named = [*zip(self.names, args), *kwargs.items()]
        given = [(name, x) for name, value in named for x in tensors_in(value)]
        self.check(given)
        self.count(given)
        if "generator" in self.names:
            self.draw(args, kwargs)
        own = {}  # by the id of the tensor that the CPU's kernel gets: it, and the device's

        def down(name, value):
            if isinstance(value, torch.Tensor) and value.is_cuda:
                grows = name in self.written and not value.numel()  # an out= that becomes as large as it must
                host = torch.empty(value.shape, dtype=value.dtype) if grows else relabel(value, CPU)
                own[id(host)] = host, value
                return host
            if isinstance(value, (list, tuple)):
                return [down(name, x) for x in value]
            if name in self.single and isinstance(value, (int, float)):
                return torch.tensor(value)  # C++ had wrapped a number, which Python is shown as what it was
            return torch.device("cpu") if isinstance(value, torch.device) else value

        def up(value):
            if isinstance(value, torch.Tensor):
                return own[id(value)][1] if id(value) in own else relabel(value, CUDA)
            return type(value)(map(up, value)) if isinstance(value, (list, tuple)) else value

        args = [down(name, x) for name, x in zip(self.names, args)]
        kwargs = {name: down(name, x) for name, x in kwargs.items()}
        out = self.op.redispatch(HOST, *args, **kwargs)  # past the CPU's autograd and autocast
        for host, x in own.values():
            if host.shape != x.shape:
                put(x, host)
        return up(out)

    def check(self, given):
        """Raise where a GPU does."""
        indexed = self.name in INDEXING and given[0][1].is_cuda
        for name, x in given:
            if x.is_cuda:
                continue
            if indexed and name == "indices":
                note("up", f"{self.name}, indices on the CPU")
            elif x.dim() or name in self.written or not self.takes_numbers:
                refuse("mix", f"{self.name}, {name} {tuple(x.shape)} on the CPU")
        if self.name in PRODUCTS and not (given[0][1].is_floating_point() or given[0][1].is_complex()):
            refuse("missing", f"{self.name} of {given[0][1].dtype}")

    def count(self, given):
        masks = [x for name, x in given if name == "indices" and x.dtype in (torch.bool, torch.uint8)]
        asks = self.name.startswith("masked_fill") and any(x.is_cuda for name, x in given if name == "value")
        if self.name == "_local_scalar_dense":
            note("down", "item")
        elif self.name in WAITS_INSIDE or (self.name in INDEXING and masks) or asks:
            note("inside", self.name)
        elif not self.name.startswith("empty"):
            note("kernel", self.name)

    def draw(self, args, kwargs):
        generator = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch._C.Generator)), None)
        if generator is None:
            note("random", self.name)
            kwargs["generator"] = DEFAULT
        elif generator._cdata not in Generator.of_device:
            refuse("mix", f"{self.name}, a generator of the CPU")


def put(x, host):
    """x with another size: that of `host`, and its memory."""
    storage = relabel(host, CUDA).untyped_storage()
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        HOST, x, storage, 0, host.shape, host.stride()
    )


def copy_(to, source, non_blocking=False):
    if to.numel():
        goes_on = to.is_cuda and (source.is_cuda or non_blocking)  # the driver stages pageable memory
        note("kernel" if goes_on else "up" if to.is_cuda else "down", "copy")
        torch.ops.aten.copy_(*(relabel(x, CPU) if x.is_cuda else x for x in (to, source)))
    return to


def hosts(what, *tensors):
    """Tensors that must be the device's, or None, as the CPU's."""
    for x in tensors:
        if x is not None and not x.is_cuda:
            refuse("mix", f"{what}, {tuple(x.shape)} on the CPU")
    return [x if x is None else relabel(x, CPU) for x in tensors]


# A GPU's attention in float32, or with a mask, by the CPU's
def attention(query, key, value, bias, compute_log_sumexp, dropout=0.0, is_causal=False, *, scale=None):
    note("kernel", "attention")
    *host, bias = hosts("attention", query, key, value, bias)
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *host, dropout, is_causal, attn_mask=bias, scale=scale
    )
    zero = relabel(torch.zeros((), dtype=torch.long), CUDA)
    return *(relabel(x, CUDA) for x in out), zero, zero


def attention_backward(
    grad,
    query,
    key,
    value,
    bias,
    out,
    log_sumexp,
    seed,
    offset,
    dropout,
    wanted,
    is_causal=False,
    *,
    scale=None,
):
    note("kernel", "attention_backward")
    *host, bias = hosts("attention_backward", grad, query, key, value, out, log_sumexp, bias)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *host, dropout, is_causal, attn_mask=bias, scale=scale
    )
    return *(relabel(x, CUDA) for x in found), None


def dropout(x, p, train):
    """native_dropout, which has no parameter for a generator."""
    note("random", "native_dropout")
    (host,) = hosts("native_dropout", x)
    mask = torch.empty(host.shape).bernoulli_(1 - p, generator=DEFAULT).bool()
    return relabel(host * mask / (1 - p), CUDA), relabel(mask, CUDA)


# ---------------------------------------------------------------- what is left of CUDA


class Generator(torch._C.Generator):
    """torch.Generator, whose device may be cuda."""

    of_device: dict = {}  # noqa: RUF012  those, by their addresses

    def __new__(cls, device="cpu"):
        self = super().__new__(cls, "cpu")
        if torch.device(device).type == "cuda":
            cls.of_device[self._cdata] = self
        return self

    @property
    def device(self):
        return torch.device("cuda:0" if self._cdata in self.of_device else "cpu")


DEFAULT = Generator("cuda")


def default_of(device):
    if torch.device(device).index:
        note("other", "generator")
    return DEFAULT


class Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.CUDA


def pretend_hardware():
    """Three values by which C++ finds a GPU are overwritten. Their places are PyTorch 2.13's."""
    folder = Path(torch.__file__).parent / "lib"
    libtorch, c10 = (ctypes.CDLL(str(folder / name)) for name in ("libtorch_cpu.so", "libc10.so"))
    # Python may write the guard of a device of its own, PrivateUse1, number 20: it goes where CUDA's, 1, is
    guard = Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    guards = (ctypes.c_void_p * 21).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    assert guards[0] and guards[20] and not guards[1]
    guards[1], guards[20] = guards[20], None
    # Autograd's engine asks CUDA's hooks whether it was built and begun: the third and the fifth of their
    # table's functions, after two destructors (ATen/detail/AcceleratorHooksInterface.h)
    libtorch._ZN2at6detail12getCUDAHooksEv.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p.from_address(libtorch._ZN2at6detail12getCUDAHooksEv())
    table = (ctypes.c_void_p * 100)(*(ctypes.c_void_p * 100).from_address(pointer.value))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda hooks: True)
    table[2] = table[4] = ctypes.cast(yes, ctypes.c_void_p).value
    pointer.value = ctypes.addressof(table)
    # Attention asks which kernel to take, 0: products and a softmax, 2: the memory-efficient one. CUDA's
    # answer is the second of the pointers of ATen/native/DispatchStub.h
    choose = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda query: CHOICE[0])
    stub = (ctypes.c_void_p * 2).in_dll(libtorch, "_ZN2at6native22_fused_sdp_choice_stubE")
    stub[1] = ctypes.cast(choose, ctypes.c_void_p).value
    for each in (guard, table, yes, choose):  # C++ still looks at them when Python has ended
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    assert torch.accelerator.current_accelerator().type == "cuda"


CHOICE = [2]
plain_attention = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(*args, **kwargs):
    CHOICE[0] = 0 if kwargs.get("enable_gqa") else 2
    return plain_attention(*args, **kwargs)


def has_kernel(name, blocks):
    """Whether native_functions.yaml gives an operation a kernel for CUDA."""
    if re.search(r"\n    [\w, ]*\bCUDA\b[\w, ]*:|ufunc_inner_loop", blocks[name]):
        return True
    delegate = re.search(r"structured_delegate: (\S+)", blocks[name])
    return bool(delegate) and has_kernel(delegate[1], blocks)


def register_kernels():
    """One for each operation that has a kernel for the CPU and one for CUDA."""
    global LIBRARY  # what it registered goes with it
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    blocks = {block.partition("(")[0]: block for block in text.split("\n- func: ")}
    LIBRARY = torch.library.Library("aten", "IMPL", "CUDA")
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        on_cpu = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU")
        if name in blocks and on_cpu and has_kernel(name, blocks):
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            LIBRARY.impl(op, Kernel(op, "device_check: NoCheck" in blocks[name]))
    LIBRARY.impl("copy_", copy_)
    LIBRARY.impl("native_dropout", dropout)
    LIBRARY.impl("_scaled_dot_product_efficient_attention", attention)
    LIBRARY.impl("_scaled_dot_product_efficient_attention_backward", attention_backward)


def before_forward(module, args):
    if isinstance(module, torch.nn.Embedding) and args[0].is_cuda and args[0].shape[-1] == 1:
        note("unit", "token")
    if isinstance(module, PreTrainedModel) and any(p.device.type == "cpu" for p in module.parameters()):
        note("host", type(module).__name__)


def count_calls(owner, name, unit):
    function = getattr(owner, name)

    def counted(*args, **kwargs):
        note("unit", unit)
        return function(*args, **kwargs)

    setattr(owner, name, counted)


def install():
    """From here on torch.device("cuda") is there, in this process: irreversibly."""
    if torch.version.cuda:
        raise SystemExit("the pretended GPU needs a CPU build of PyTorch: this one has CUDA's kernels")
    try:
        pretend_hardware()
    except (AssertionError, AttributeError, ValueError, RuntimeError):
        raise AssertionError(
            f"the pretended GPU knows the tables of PyTorch 2.13: {torch.__version__} has others: see "
            "pretend_hardware()"
        ) from None
    register_kernels()
    torch.autograd.set_multithreading_enabled(False)  # so that the lines of backward passes are known
    torch.Generator = Generator
    torch.UntypedStorage.clone = storage_clone
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    name = "a pretended GPU"
    facts = type("Properties", (), {"name": name, "major": 8, "minor": 0, "total_memory": MEMORY})
    for key, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: note("down", "synchronize"),
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": lambda device=None: facts,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "manual_seed": lambda seed: DEFAULT.manual_seed(seed),
        "manual_seed_all": lambda seed: DEFAULT.manual_seed(seed),
        "get_rng_state": lambda device=0: default_of(device).get_state(),
        "set_rng_state": lambda state, device=0: default_of(device).set_state(state),
    }.items():
        setattr(torch.cuda, key, value)
    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    register_optimizer_step_post_hook(lambda *_: note("unit", "step"))
    count_calls(torch.Tensor, "backward", "backward")


# ---------------------------------------------------------------- what is said of it


def found():
    """[{"kind", "what", "phase", "line", "count"}] of LOG."""
    keys = ("kind", "what", "phase", "line")
    return [{**dict(zip(keys, key)), "count": count} for key, count in LOG.most_common()]


def report(records):
    for kind in ("mix", "missing", "random", "other", "host"):
        some = [x for x in records if x["kind"] == kind]
        print(f"\n{kind}: {'' if some else 'none'}")
        for x in some:
            print(f"  {x['count']:7} x {x['line']}: {x['what']}")
    columns = {"tokens": ("unit", "token"), "backward": ("unit", "backward"), "steps": ("unit", "step")}
    columns |= {"waits": (WAITS, None), "kernels": ("kernel", None)}
    print(f"\n{'phase':20}" + "".join(f"{name:>10}" for name in columns))
    for phase in (*PHASES, "else"):
        counts = []
        for kinds, what in columns.values():
            counts.append(
                sum(
                    x["count"]
                    for x in records
                    if x["phase"] == phase and x["kind"] in kinds and what in (None, x["what"])
                )
            )
        if any(counts):
            print(f"{phase:20}" + "".join(f"{count:10}" for count in counts))
    for title, kinds, most in (("waits", WAITS, 20), ("kernels", ("kernel",), 10)):
        for phase in ("rollout", "score", "update", "record"):
            lines = collections.Counter()
            for x in records:
                if x["phase"] == phase and x["kind"] in kinds:
                    lines[x["line"]] += x["count"]
            if lines:
                print(f"\n{title}, {phase}:")
            for line, count in lines.most_common(most):
                print(f"  {count:7} x {line}")


def load(program, name):
    """A program of the repository as a module, run under this name. On the CPU, too, it looks as seldom at
    which rows have ended as on a GPU: rows dropped at other tokens leave other roundings behind."""
    path = Path(program).resolve()
    source = path.read_text().replace('_EOS_CHECK_EVERY = {"cpu": 1', '_EOS_CHECK_EVERY = {"cpu": 16')
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def main(program, *words):
    if "DEVICE=cpu" not in words:
        install()
    sys.argv = [program, *words]
    sys.path.insert(0, str(Path(program).resolve().parent))
    try:
        load(program, "__main__")
    finally:
        if "LOG" in os.environ:
            Path(os.environ["LOG"]).write_text(json.dumps(found()))
        else:
            report(found())


if __name__ == "__main__":
    main(*sys.argv[1:])
