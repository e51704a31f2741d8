"""Constrained beams of grpo/grpo_rec.py beside transformers' generate, of the same model and prompts.

    python bench/rec_decoding.py                 # 16 and 50 beams, a small model and a larger one
    python bench/rec_decoding.py --prompts 8 --repeats 3

generate is constrained in the two usual ways: prefix_allowed_tokens_fn, and a logits processor that looks up
each beam's prefix in a dictionary, as MiniOneRec has it. Both look at one beam after the other in Python, and
both are renormalised here, so that all three rank by the same probabilities. Printed are the least time of
--repeats and the share of beams, place by place, that are the same item.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

ROOT = Path(__file__).resolve().parents[1]
MODELS = {  # (width, layers, vocabulary)
    "default, 2 layers of 64": (64, 2, 560),
    "4 layers of 256, a vocabulary of 32,000": (256, 4, 32000),
}
ITEMS = 3686  # as many as the Amazon category has; codes of 256 values, drawn at random
HISTORY = 10


def load_script():
    spec = importlib.util.spec_from_file_location("grpo_rec", ROOT / "grpo/grpo_rec.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_codes(generator):
    """(items, 3) distinct codes: token ids of three ranges, the first of 48 values."""
    sizes = (48, 256, 256)
    codes = torch.stack([torch.randint(size, (2 * ITEMS,), generator=generator) for size in sizes], 1)
    codes = codes.unique(dim=0)
    codes = codes[torch.randperm(len(codes), generator=generator)[:ITEMS]]
    return codes + torch.tensor([0, 48, 304])


class DictionaryProcessor(LogitsProcessor):
    """A mask for one beam after the other, from a dictionary of prefixes."""

    def __init__(self, allowed, prompt_length):
        self.allowed = allowed
        self.prompt_length = prompt_length

    def __call__(self, input_ids, scores):
        mask = torch.full_like(scores, -torch.inf)
        for beam, ids in enumerate(input_ids):
            mask[beam, self.allowed[tuple(ids[self.prompt_length :].tolist())]] = 0
        return (scores + mask).log_softmax(-1)


def by_generate(model, prompts, beams, allowed, way):
    """The codes of the beams of generate, (prompts, beams, 3)."""
    size = prompts.shape[1]
    options = {}
    if way == "prefix_allowed_tokens_fn":

        def look_up(row, ids):
            return allowed[tuple(ids[size:].tolist())]

        options["prefix_allowed_tokens_fn"] = look_up
    else:
        processor = DictionaryProcessor(allowed, size)
        options["logits_processor"] = LogitsProcessorList([processor])
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=3,
        do_sample=False,
        renormalize_logits=True,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    return out[:, size:].view(len(prompts), beams, 3)


def least(function, repeats):
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - started)
    return min(times), result


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    words = parser.parse_args()
    rec = load_script()
    generator = torch.Generator().manual_seed(0)
    codes = make_codes(generator)
    allowed = {}
    for item in codes.tolist():
        for level, code in enumerate(item):
            allowed.setdefault(tuple(item[:level]), set()).add(code)
    allowed = {prefix: sorted(some) for prefix, some in allowed.items()}
    threads = f"{torch.get_num_threads()} threads"
    print(f"{words.prompts} prompts of {3 * HISTORY} tokens, {ITEMS} items of 3 codes, {threads}")
    for name, (width, layers, vocabulary) in MODELS.items():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
        theirs = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.mul_(3.0)  # so that histories differ in what they like
        ours = LlamaForCausalLM(config).eval()
        ours.load_state_dict(theirs.state_dict())
        ours.set_attn_implementation("shared_prompts")
        rec._SHARED_DECODING.add(ours)  # as check_models() finds
        trie = rec.Trie(codes, torch.device("cpu"))
        rows = codes[torch.randint(ITEMS, (words.prompts, HISTORY), generator=generator)].flatten(1)
        for beams in (16, 50):
            prompts = rows.tolist()

            def search():
                return rec.search(ours, trie, prompts, beams, 0)

            search()
            seconds, (items, _, _) = least(search, words.repeats)
            print(f"{name}, {beams} beams: {1000 * seconds:.0f} ms", flush=True)
            for way in ("prefix_allowed_tokens_fn", "a dictionary per beam"):

                def generate():
                    return by_generate(theirs, rows, beams, allowed, way)

                took, found = least(generate, words.repeats)
                same = (found == codes[items]).all(-1).float().mean().item()
                said = f"{1000 * took:.0f} ms, {took / seconds:.1f} times as long; beams equal: {same:.1%}"
                print(f"  generate with {way}: {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
