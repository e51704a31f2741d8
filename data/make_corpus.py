"""Writes a data set for ppo/ppo_rag.py, a folder with corpus.jsonl and questions.jsonl.

    python data/make_corpus.py hotpot_dev_distractor_v1.json FOLDER    # HotpotQA's own files, one or several
    python data/make_corpus.py validation FOLDER                       # that split of HotpotQA from the hub
    python data/make_corpus.py my_texts/ FOLDER                        # .txt and .md files: only corpus.jsonl

In text files a blank line ends a paragraph. Its title is the file's name, or the heading that stands alone
above it (`# Fines`, then a blank line). Write questions.jsonl, questions.csv or questions.parquet yourself.
"""

import json
import re
import sys
from pathlib import Path


def read_texts(folder):
    """Returns the paragraphs {"title", "text"} of the .txt and .md files in a folder and below."""
    paragraphs = []
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix not in (".txt", ".md"):
            continue
        title = path.stem
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            sys.exit(f"{path} is not in UTF-8: {error}")
        for block in re.split(r"\n\s*\n", text.strip()):
            if re.fullmatch(r"#+ .*", block):
                title = block.strip("# ")
            elif block:
                paragraphs.append({"title": title, "text": block})
    return paragraphs


def from_hotpot(records):
    """Returns (questions, paragraphs) of HotpotQA's records: its file has lists of pairs, the hub columns.
    Gold titles that a record's context does not contain (as in the fullwiki format) are left out."""
    questions = []
    paragraphs = {}
    for record in records:
        context, facts = record["context"], record["supporting_facts"]
        if isinstance(context, dict):
            context = zip(context["title"], context["sentences"])
            facts = zip(facts["title"], facts["sent_id"])
        titles = set()
        for title, sentences in context:
            titles.add(title)
            text = "".join(sentences).strip()
            paragraphs[title, text] = {"title": title, "text": text}
        question = {name: record[name] for name in ("question", "answer", "type")}
        question["gold"] = sorted(titles & {title for title, _ in facts})
        questions.append(question)
    return questions, [paragraph for paragraph in paragraphs.values() if paragraph["text"]]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} rows in {path}")


def main(*arguments):
    if len(arguments) < 2:
        sys.exit(__doc__)
    *sources, folder = arguments
    folder = Path(folder)
    if Path(sources[0]).is_dir():
        write(folder / "corpus.jsonl", read_texts(sources[0]))
        return
    records = []
    for source in sources:
        if source.endswith(".json"):
            records += json.loads(Path(source).read_text())
        else:
            import datasets  # slow

            records += datasets.load_dataset("hotpotqa/hotpot_qa", "distractor", split=source)
    questions, paragraphs = from_hotpot(records)
    write(folder / "questions.jsonl", questions)
    write(folder / "corpus.jsonl", paragraphs)
    print(f"Then: python ppo/ppo_rag.py DATASET={folder} GENERATOR=... 'TOP_KS=(5, 10, 20)' ...")


if __name__ == "__main__":
    main(*sys.argv[1:])
