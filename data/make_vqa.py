"""Writes the questions of VQAv2 or OKVQA as rows for rce/rce_icl.py.

    python data/make_vqa.py QUESTIONS.json ANNOTATIONS.json FOLDER_OF_IMAGES okvqa.jsonl

The files are the official ones (visualqa.org, okvqa.allenai.org), such as mscoco_val2014_annotations.json.
Each row: question, answers (all annotators', ten in these sets), image (a path), question_id, question_type.
In rce_icl.py: TRAIN_DATASET = {"path": "okvqa.jsonl", "type": "jsonl", "input": "question",
"output": "answers", "image": "image"} and GOLDS = "annotators". Questions without annotation or image are
left out and counted.
"""

import json
import sys
from pathlib import Path


def make_rows(questions, annotations, images):
    """Yields rows in the order of the questions."""
    annotated = {}
    for annotation in json.loads(Path(annotations).read_text())["annotations"]:
        annotated[annotation["question_id"]] = annotation
    paths = {}  # {image id: path}: COCO_val2014_000000262148.jpg
    for path in Path(images).iterdir():
        number = path.stem.rpartition("_")[2]
        if number.isdecimal():
            paths[int(number)] = str(path.resolve())
    for question in questions:
        annotation, image = annotated.get(question["question_id"]), paths.get(question["image_id"])
        if not annotation or not image:
            continue
        answers = [answer["answer"] for answer in annotation["answers"]]
        row = {"question": question["question"], "answers": answers, "image": image}
        yield row | {name: annotation.get(name, "") for name in ("question_id", "question_type")}


def main(questions, annotations, images, out):
    questions = json.loads(Path(questions).read_text())["questions"]
    rows = list(make_rows(questions, annotations, images))
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    num_images = len({row["image"] for row in rows})
    print(f"{len(rows)} of {len(questions)} questions about {num_images} images: {out}")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
