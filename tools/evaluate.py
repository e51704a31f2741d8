"""Scores a policy on held-out prompts: greedy, pass@k and majority@k, each with a 95% interval.

    python tools/evaluate.py checkpoints/grpo                      # best/policy of a run
    python tools/evaluate.py checkpoints/grpo/step_20 SAMPLES=16   # a checkpoint of it
    python tools/evaluate.py Qwen/Qwen2.5-0.5B-Instruct @recipes/gsm8k_qwen2.5-0.5b.txt

A run of ppo.py, grpo.py, rce.py, sft.py or dpo.py has its constants in training_config.json: data, template,
lengths and the function that decides are those of the run; KEY=VALUE changes one. Its trainer is imported,
for sft.py, dpo.py and a model of the hub grpo.py. If the run comes from another machine, the trainer and the
data of this repository are taken. An adapter outside a run is put on the model that its config names.
SAMPLES (8) responses to each prompt are sampled. Every one goes to OUT, a .jsonl file: evaluation_NAME.jsonl
in the run (NAME is best or step_N), evaluation.jsonl here.

    pass@k      1 - C(n - c, k) / C(n, k): one of k samples is correct, where c of n were (2107.03374)
    majority@n  the answer that most of the n samples agree with is correct (2203.11171). Two agree if the
                function that decides takes one for correct where the other is the gold answer

An interval is Wilson's, for as many independent yes and no answers as the prompts' variance tells.
"""

import importlib.util
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = ("ppo.py", "grpo.py", "rce.py", "sft.py", "dpo.py")
sys.path.insert(0, str(ROOT))
import rewards  # noqa: E402


def find_run(path):
    """Returns the run that a path belongs to, or None, and what its training_config.json holds."""
    folder = Path(path).absolute()
    for run in (folder, *folder.parents):
        if (run / "training_config.json").exists():
            config = json.loads((run / "training_config.json").read_text())
            if "ACCURACY_FUNCTION" not in config["constants"]:
                name = Path(config["file"]).name
                raise rewards.UserError(f"{name} trained it: runs of {', '.join(TRAINERS)} can be scored")
            return run, config
    return None, {"file": str(ROOT / "grpo/grpo.py"), "constants": {}}


def find_policy(path, run):
    """Returns the policy: a folder, or a name on the hub."""
    folder = Path(path).absolute()
    for policy in (folder / "best/policy", folder / "policy", folder):
        if (policy / "config.json").exists() or (policy / "adapter_config.json").exists():
            return policy
    if run or folder.is_dir():
        raise rewards.UserError("it holds no policy: name a run, or best or step_N in one")
    return path


def import_file(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_trainer(config):
    """Returns the module of a trainer that samples, with the constants of the run."""
    file = Path(config["file"])
    of_this_name = next(ROOT.glob(f"*/{file.name}"), None)
    if of_this_name and not file.exists():  # the run was copied from another machine
        print(f"{file} is not on this machine: {of_this_name} and data of {ROOT} are taken")
        file = of_this_name
    if Path(config.get("program", file)).name != file.name:
        print(f"The run is evaluated by {file.name} alone, without the changes of {config['program']}")
    module = import_file(file)
    root = json.dumps(str(module.ROOT))[1:-1]
    constants = json.loads(json.dumps(config["constants"]).replace("{ROOT}", root))
    if not hasattr(module, "sampling_logprobs"):  # sft.py, dpo.py
        module = import_file(ROOT / "grpo/grpo.py")
        constants["BATCH_SIZE"] = constants["EVAL_BATCH_SIZE"]
        constants["MAX_PROMPT_TOKENS"] = constants["MAX_TOKENS"]
        constants["MAX_EVAL_PROMPTS"] = constants.get("MAX_EVAL_ROWS", constants.get("MAX_EVAL_PAIRS"))
        constants["EVAL_DATASETS"] = prompts_of(constants["EVAL_DATASETS"])
    for name in constants.keys() & module.constants().keys():
        if name != "ACCURACY_FUNCTION" or constants[name]:  # sft.py: None
            setattr(module, name, constants[name])
    return module


def prompts_of(specs):
    """Returns what grpo.py can read of the data sets of sft.py and dpo.py. Whole chats have no gold answers,
    and grpo.py shows no tools."""
    found = []
    for spec in specs:
        spec = {"input": spec.get("prompt"), **spec}
        if spec["input"] and "tools" not in spec:
            keys = ("path", "type", "name", "split", "input", "output")
            found.append({key: spec[key] for key in keys if key in spec})
    return found


def base_of(policy):
    """Returns the model that an adapter belongs to; of a whole model its own name."""
    adapter = Path(policy) / "adapter_config.json"
    return json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else str(policy)


def load_policy(module, policy):
    causal = module.transformers.AutoModelForCausalLM
    if not (Path(policy) / "adapter_config.json").exists():
        return module.load_model(causal, policy)
    import peft  # slow

    return peft.PeftModel.from_pretrained(module.load_model(causal, module.ACTOR_MODEL), policy).eval()


def make_sampler(module, policy):
    """Returns a trainer without critic, reference and data: it can respond() and tell what is correct()."""
    trainer_class = next(x for name, x in vars(module).items() if name.endswith("Trainer"))
    trainer = trainer_class.__new__(trainer_class)
    trainer.device = module.join_processes()
    module.transformers.utils.logging.disable_progress_bar()
    trainer.tokenizer = module.transformers.AutoTokenizer.from_pretrained(policy)
    trainer.actor = load_policy(module, policy).to(trainer.device)
    trainer.end_ids = module.find_end_ids(trainer.actor, trainer.tokenizer)
    name = module.ACCURACY_FUNCTION  # of the trainer's file or in rewards/
    trainer.accuracy_function = rewards.find_function(vars(module).get(name, name))
    return trainer


def judge(trainer, batch):
    """Returns whether each response is correct, a list of 0 and 1."""
    values = trainer.correct(batch).tolist()
    if not set(values) <= {0.0, 1.0}:
        raise rewards.UserError("ACCURACY_FUNCTION must give 0 or 1, such as exact_answer and em do")
    return list(map(int, values))


def majority(trainer, batch, part, correct):
    """Returns whether the response to a prompt that most others agree with is correct. part: its slice."""
    row, texts = batch.rows[part.start], batch.texts[part]
    pairs = SimpleNamespace(rows=[{**row, "answer": text} for text in texts] * len(texts))
    pairs.texts = [text for text in texts for _ in texts]
    pairs.response_ids = [ids for ids in batch.response_ids[part] for _ in texts]
    agreements = judge(trainer, pairs)
    votes = [sum(agreements[first : first + len(texts)]) for first in range(0, len(pairs.rows), len(texts))]
    return correct[votes.index(max(votes))]


def pass_at(correct, k):
    """Returns the chance that one of k samples is correct, drawn from the given ones without replacement."""
    wrong = len(correct) - sum(correct)
    return 1 - math.comb(wrong, k) / math.comb(len(correct), k)


def interval(values):
    """Returns the mean of the prompts' values, each 0 to 1, and its 95% interval, low and high."""
    count, mean = len(values), sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / count
    if variance > 0:
        count *= mean * (1 - mean) / variance  # 1 for values of 0 and 1
    spread = 1.96**2 / count
    half = math.sqrt(spread * mean * (1 - mean) + spread**2 / 4)
    return mean, (mean + spread / 2 - half) / (1 + spread), (mean + spread / 2 + half) / (1 + spread)


def evaluate(module, trainer, rows, samples, out):
    """Samples, writes every response to the file `out`, and returns {name: a value per prompt}."""
    generator = module.torch.Generator().manual_seed(module.SEED)
    results = defaultdict(list)
    with open(out, "w") as file:
        for first in module.progress(range(0, len(rows), module.BATCH_SIZE), "batches"):
            part = rows[first : first + module.BATCH_SIZE]
            results["greedy"] += write(file, "greedy", trainer, trainer.respond(part, None))
            uniform = module.torch.rand(len(part) * samples, module.MAX_NEW_TOKENS, generator=generator)
            sampled = trainer.respond([row for row in part for _ in range(samples)], uniform)
            correct = write(file, "sampled", trainer, sampled)
            for place in range(0, len(correct), samples):
                one = slice(place, place + samples)
                for k in [2**i for i in range(samples.bit_length())]:
                    results[f"pass@{k}"].append(pass_at(correct[one], k))
                results[f"majority@{samples}"].append(majority(trainer, sampled, one, correct[one]))
    return results


def write(file, kind, trainer, batch):
    """Writes responses, and returns whether each is correct."""
    verdicts = judge(trainer, batch)
    for row, text, is_correct in zip(batch.rows, batch.texts, verdicts):
        record = {name: row[name] for name in ("id", "prompt", "answer")}
        record |= {"kind": kind, "response": text, "correct": is_correct}
        file.write(json.dumps(record) + "\n")
    return verdicts


def number_of_samples(text):
    if not text.isdecimal() or int(text) == 0:
        raise rewards.UserError(f"SAMPLES={text} is not a number from 1 on")
    return int(text)


def main(path, *words):
    options = dict(word.split("=", 1) for word in words if word.startswith(("SAMPLES=", "OUT=")))
    try:
        samples = number_of_samples(options.get("SAMPLES", "8"))
        run, config = find_run(path)
        policy = find_policy(path, run)
        module = load_trainer(config)
        if not run:
            module.ACTOR_MODEL = base_of(policy)
        module.apply_overrides(word for word in words if word.split("=")[0] not in options)
        trainer = make_sampler(module, policy)
        rows = []
        for spec in module.EVAL_DATASETS:
            rows += module.load_rows([spec], trainer.tokenizer)[: module.MAX_EVAL_PROMPTS]
        if not rows or None in module.column(rows, "answer"):
            raise rewards.UserError("EVAL_DATASETS gives no rows with answers: name output in each")
        default = run / f"evaluation_{policy.parent.name}.jsonl" if run else "evaluation.jsonl"
        out = options.get("OUT", default)
        print(f"{policy}: {len(rows)} prompts, by {module.ACCURACY_FUNCTION}; writing to {out}", flush=True)
        results = evaluate(module, trainer, rows, samples, out)
    except (rewards.UserError, OSError) as error:
        print(f"evaluate.py {path}: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
    for name, values in results.items():
        print("{:14} {:.3f}  ({:.3f} to {:.3f})".format(name, *interval(values)))


if __name__ == "__main__":
    if len(sys.argv) < 2 or {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    else:
        main(*sys.argv[1:])
