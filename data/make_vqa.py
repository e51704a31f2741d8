"""Questions about images (VQAv2, OKVQA, or a data set with a column of images) as rows for rce/rce_icl.py.

The official files: questions, annotations, and the folder of images (visualqa.org, okvqa.allenai.org):

    python data/make_vqa.py QUESTIONS=OpenEnded_mscoco_val2014_questions.json \
        ANNOTATIONS=mscoco_val2014_annotations.json IMAGES=val2014 OUT=data/okvqa/test.jsonl

A data set of the hub, or a folder or parquet file with a column of images, which are written beside the rows:

    python data/make_vqa.py DATASET=lmms-lab/OKVQA SPLIT=val2014 OUT=data/okvqa/test.jsonl

Each row: question, answers (all annotators', ten in these sets), image (a path), question_id, question_type.
In rce_icl.py: TRAIN_DATASET = {"path": "data/okvqa/train.jsonl", "type": "jsonl", "input": "question",
"output": "answers", "image": "image"} and GOLDS = "annotators".
"""

import json
import sys
from pathlib import Path

from PIL import Image

QUESTIONS = ""  # the official file of questions
ANNOTATIONS = ""  # the official file of annotations
IMAGES = ""  # the folder of the images
DATASET = ""  # instead of these three: a hub name, a folder, or a parquet file
SPLIT = "train"  # of DATASET
OUT = ""  # the jsonl file to write


def fail(text):
    print(f"make_vqa.py: {text}", file=sys.stderr)
    sys.exit(2)


def official_rows(questions_file, annotations_file, images):
    """Yields rows of the official files, in the order of the questions."""
    questions = read(questions_file, "questions")
    annotations = {row["question_id"]: row for row in read(annotations_file, "annotations")}
    names = {}  # {image id: path}: COCO_val2014_000000262148.jpg
    if not Path(images).is_dir():
        fail(f"IMAGES = {images!r} is no folder: give the folder of the images, unpacked")
    for path in sorted(Path(images).iterdir()):
        digits = path.stem.rpartition("_")[2]
        if digits.isdecimal():
            names[int(digits)] = path
    for question in questions:
        where = f"{questions_file}: question {question['question_id']}"
        if question["question_id"] not in annotations:
            fail(f"{where} has no annotation in {annotations_file}")
        if question["image_id"] not in names:
            fail(f"{where}: {images} has no image {question['image_id']:012d}")
        annotation = annotations[question["question_id"]]
        path = names[question["image_id"]]
        check_image(path, where)
        yield make_row(question, annotation, path.resolve())


def read(path, key):
    """Returns a list of the JSON file: what it has under the key."""
    try:
        return json.loads(Path(path).read_text())[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{path} is no official file of {key} ({type(error).__name__}: {error})")


def check_image(path, where):
    try:
        Image.open(path).verify()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        fail(f"{where}: {path} is no image ({error})")


def dataset_rows(name, split, out):
    """Yields rows of a data set with columns question, answers and image. Writes its images below `out`."""
    from datasets import load_dataset

    folder = out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    kind = "parquet" if name.endswith(".parquet") else None
    try:
        rows = load_dataset(kind, data_files=name, split="train") if kind else load_dataset(name, split=split)
    except Exception as error:  # datasets raises many types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"DATASET = {name!r}, SPLIT = {split!r} cannot be loaded ({reason})")
    if missing := {"question", "answers", "image"} - set(rows.column_names):
        fail(f"{name} has no column {sorted(missing)[0]!r}, only {rows.column_names}")
    for number, row in enumerate(rows):
        path = folder / f"{number}.png"
        try:
            row["image"].convert("RGB").save(path)
        except (AttributeError, OSError) as error:
            fail(f"{name} row {number}: its image cannot be read ({error})")
        yield make_row({"question_id": number, **row}, row, path.resolve())


def make_row(question, annotation, path):
    """Returns a row. Answers are texts, or records that hold one as "answer", in a list or, as the hub has
    lists of records, a dict of lists; or one text."""
    answers = annotation["answers"]
    if isinstance(answers, dict):
        answers = answers.get("answer")
    if isinstance(answers, str):
        answers = [answers]
    answers = [answer["answer"] if isinstance(answer, dict) else answer for answer in answers or []]
    if not answers or not all(isinstance(answer, str) for answer in answers):
        what = f"question {question['question_id']}: its answers are {annotation['answers']!r:.80}"
        fail(f"{what}, not a list of texts")
    row = {"question": question["question"], "answers": answers, "image": str(path)}
    row["question_id"] = question["question_id"]
    row["question_type"] = annotation.get("question_type", "")
    return row


def main():
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in ("QUESTIONS", "ANNOTATIONS", "IMAGES", "DATASET", "SPLIT", "OUT"):
            fail(f"{word!r} is not KEY=VALUE with a constant of this file")
        globals()[key] = value
    official = [QUESTIONS, ANNOTATIONS, IMAGES]
    if not OUT or bool(DATASET) == any(official) or (any(official) and not all(official)):
        fail("give OUT, and either QUESTIONS, ANNOTATIONS and IMAGES, or DATASET")
    out = Path(OUT)
    if not out.suffix:
        fail(f"OUT = {OUT!r} is the name of a file, such as test.jsonl: its images go into the folder test")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = list(dataset_rows(DATASET, SPLIT, out) if DATASET else official_rows(*official))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} questions about {len({row['image'] for row in rows})} images: {out}")


if __name__ == "__main__":
    main()
