"""Learns which demonstrations to show to a reader of pictures, in the world of data/make_shapes.py.

Shows three rules beside the trainer's own in the test: similarity of the texts alone, of the pictures alone,
and "same format", which is given each row's frame and sort, as no other rule is: it shows first the rows of
the query's frame and sort.

Change: the constants below, or trainers_rules() for a rule of your own.

    python data/make_shapes.py               # once: pictures, questions, the reader and vectors
    python examples/vqa_world.py             # mines, trains and tests; takes SEED=2 and so on, as rce_icl.py
"""

import json
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "rce"))
import rce_icl

WORLD = Path(os.environ.get("VQA_WORLD", ROOT / "checkpoints/shapes"))  # where data/make_shapes.py writes


def data_set(name):
    """Returns what rce_icl.py reads of train or test."""
    spec = {"path": f"{WORLD}/{name}.jsonl", "type": "jsonl", "input": "question", "output": "answers"}
    return {**spec, "image": "image", "vectors": f"{WORLD}/{name}.npy"}


rce_icl.TRAIN_DATASET = data_set("train")
rce_icl.TEST_DATASET = data_set("test")
rce_icl.GOLDS = "annotators"
rce_icl.READER = f"{WORLD}/reader"
rce_icl.OUTPUT_DIR = f"{ROOT}/checkpoints/vqa_world"
rce_icl.EMBED_ANSWERS = False  # the network reads a candidate's picture and question
rce_icl.SHOTS = 2
rce_icl.EVAL_SHOTS = (1, 2)
rce_icl.POOL_SIZE = 24
rce_icl.MAX_ANSWER_TOKENS = 6
rce_icl.READER_BATCH_SIZE = 64
rce_icl.VALIDATION_QUERIES = 150
rce_icl.MINE_QUERIES = 800
rce_icl.RCE_EPOCHS = 20
rce_icl.TAU = 0.2
rce_icl.TEST_ORACLE = 100


def trainers_rules(trainer, settings, queries, shots, own=rce_icl.baseline_accuracies):
    """Returns {name: accuracies, (queries,)} of the trainer's rules and of three more."""
    accuracies = own(trainer, settings, queries, shots)
    corpus = trainer.corpus
    facts = {}  # frame and sort by id, such as train.jsonl:3
    for spec in (rce_icl.TRAIN_DATASET, rce_icl.test_data()[1]):
        for number, line in enumerate(Path(spec["path"]).read_text().splitlines() if spec else (), 1):
            row = json.loads(line)
            facts[f"{Path(spec['path']).name}:{number}"] = (row["frame"], row["sort"])
    words = json.loads((WORLD / "reader/config.json").read_text())["text_config"]["hidden_size"]
    lists = {"similarity of texts": [], "similarity of pictures": [], "same format": []}
    for query in queries:
        pool = corpus.pool_of(query)
        by_part = corpus.demo_vectors[pool] * torch.tensor(
            query["vector"]
        )  # (pool, words' and pictures' size)
        text, picture = by_part[:, :words].sum(1), by_part[:, words:].sum(1)
        wanted = facts[query["id"]]
        shown = [facts[demo["id"]] for demo in corpus.examples(pool)]
        same = torch.tensor([(frame == wanted[0]) + (sort == wanted[1]) for frame, sort in shown])
        for name, score in zip(lists, (text, picture, same + text / 10)):
            lists[name].append(pool[score.argsort(descending=True)[:shots]].tolist())
    return accuracies | {name: trainer.accuracy_of(queries, of_rule) for name, of_rule in lists.items()}


rce_icl.baseline_accuracies = trainers_rules

if __name__ == "__main__":
    rce_icl.train_main()
