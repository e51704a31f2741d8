"""Rebuild data/rag/ from a seed: an encyclopaedia of invented people and works, questions, a tiny reader.

    python data/make_rag.py             # about 10 minutes on 2 cores
    python data/make_rag.py SEED=3 OUT=/tmp/rag

Paragraphs are alike on purpose: twenty people share a first name and three a surname, films and operas bear
the names of novels; a noun's cycle has one author or six. Questions are of five types, told by their words.
What the best action is, the words do not tell in three of them; what BM25 finds does:

    one-hop     When was Robert Merrow born?  BM25 puts the paragraph first. One in three has the surname as
                it was spelt of old, Merrowe: twenty Roberts are as good to BM25, a reranker is needed.
    reworded    In what year did the Torvalian Robert Merrow come into the world?  As above, in other words.
    work        Who was the director of The Silent Harbor?  One paragraph where nothing else bears the name;
                one in three is a film or an opera that shares its name, and then it may stand second.
    two-hop     In which town was the author of The Silent Harbor born?  Its second paragraph is 2nd to 8th.
    comparison  Who was born earlier, Robert Merrow or Mary Tinsel?  Two paragraphs are needed.

The reader, a causal model, learns on *other* worlds: every few steps the facts are dealt anew from the same
vocabulary, so it reads and cannot remember.

Writes corpus.jsonl, questions.jsonl and reader/. What the reader is worth on it,
`python ppo/ppo_rag.py MAX_STEPS=0` prints.
"""

import json
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "ppo"))
from ppo_rag import PARAGRAPH, PROMPT

SEED = 1
OUT = str(ROOT / "data/rag")
QUESTIONS = {"one-hop": 420, "work": 400, "reworded": 400, "two-hop": 200, "comparison": 80}
OLD_SPELLINGS = 1 / 3  # of one-hop and reworded questions
SHARED_NAMES = 1 / 2  # of work questions as drawn; a third remain, for what is drawn twice counts once
LONE_CREATORS = 1 / 2  # of the nouns: one author, director, composer each
READER_STEPS = 1200
READER_BATCH = 12  # contexts a step, each with QUESTIONS_PER_CONTEXT questions
QUESTIONS_PER_CONTEXT = 10
STEPS_PER_WORLD = 4  # of training; dealing a world takes as long as a small step
READER_LEARNING_RATE = 2e-3
MOST_PARAGRAPHS = 8  # in a lesson of the reader: ppo_rag.py's largest top_k

UNKNOWN = "unknown"  # what the reader says when its paragraphs do not tell

FIRST_NAMES = """
    Robert William Richard Margaret Elizabeth Katherine Edward John Theodore James Henry Charles Mary Martha
    Sarah Helen Dorothy Frances Anthony Andrew Alexander Barbara Caroline Daniel Eleanor Francis George
    Harriet Isabel Joseph Laurence Matilda Nicholas Oliver Patrick Rebecca Samuel Thomas Victoria Walter Agnes
    Bridget Clara Edith Flora Grace Hugh Ivor Julia Kenneth Louisa Miles Norah Owen Philip Ruth Simon Toby
    Ursula Vera
""".split()
ADJECTIVES = """
    Silent Broken Golden Hidden Distant Burning Frozen Hollow Crimson Endless Fading Gentle Haunted Iron
    Jealous Kindly Lonely Midnight Narrow Painted Quiet Restless Sleeping Tangled Unseen Velvet Wandering
    Yellow Ancient Bitter Crooked Drowned Empty Fallen Green Honest Invisible Last Marble Northern
""".split()
NOUNS = """
    Harbor Lamp Garden Mirror Tower Bridge Forest Island Letter Orchard Castle Window Meadow Anchor Candle
    Desert Engine Feather Glacier Hunter Kingdom Lantern Mountain Needle Ocean Palace Quarry Rider Shepherd
    Temple Valley Winter Archer Beacon Canyon Dancer Ember Falcon Grove Heron Jester Key Lighthouse Mill
    Nightingale Oak Pilgrim Raven Statue Thorn Village Whistle Abbey Bell Crown Door Emperor Fountain Gate
    Horizon
""".split()


def joined(beginnings, ends):
    return [a + b for a in beginnings.split() for b in ends.split()]


SURNAMES = joined(
    "Mer Tin Hol Bran Cor Dal Fen Gor Hasl Wick Ash Brid Cald Dray El Far Gil Hark Led Nor",
    "row sel den ford by wood man kin ton ley mer stock well worth shaw hurst combe lock ridge gast",
)
TOWNS = joined("Tor Ost Vel Kar Lun Mos Nar Pel Rud Sor", "vale mere stad holm burg gate bridge minster")
RIVERS = joined("Es Al Ir Or Ul Ab Em Ag", "ter na wen dra lis")
CREATORS = 6 * ["author"] + 3 * ["director"] + 3 * ["composer"]  # of each noun
KINDS = {"author": "novel", "director": "film", "composer": "opera"}
APPEARED = {"author": "published", "director": "released", "composer": "performed"}
OTHERS = "painter sculptor doctor sailor teacher judge gardener banker".split()
BIRTH_YEARS = (1800, 1899)
TOWN_YEARS = (1700, 1799)
WORK_YEARS = (1825, 1959)
ASKED = {  # of a person: {type: {what is asked for: forms of the question}}
    "one-hop": {
        "year": ["When was {} born?", "In which year was {} born?"],
        "town": ["Where was {} born?", "In which town was {} born?"],
        "calling": ["What was the profession of {}?", "What profession had {}?"],
    },
    "reworded": {
        "year": ["In what year did {} come into the world?", "What year saw {} come into the world?"],
        "town": ["From what place did {} hail?", "What place did {} hail from?"],
        "calling": ["What did {} do for a living?", "How did {} earn a living?"],
    },
}


# ---------------------------------------------------------------- worlds


def old_spelling(surname):
    """Merrow: Merrowe, which no paragraph has."""
    return surname + "e"


def demonym(town):
    """Torvale: Torvalian."""
    return town.rstrip("aeiou") + "ian"


def make_people(rng):
    """A dozen creators a noun and half as many others; every pair of first name and surname is one person."""
    names = [(first, last) for first in FIRST_NAMES for last in SURNAMES]
    rng.shuffle(names)
    callings = [(calling, noun) for noun in NOUNS for calling in CREATORS]
    callings += [(rng.choice(OTHERS), None) for _ in range(len(callings) * 2 // 3)]
    people = []
    for (first, last), (calling, noun) in zip(names, callings):
        person = {"title": f"{first} {last}", "first": first, "last": last, "calling": calling, "noun": noun}
        person |= {"town": rng.choice(TOWNS), "year": rng.randint(*BIRTH_YEARS), "works": []}
        role = f"{calling} of the {noun} cycle" if noun else f"a {calling}"
        person["text"] = f"{role}, born in the town of {person['town']} in {person['year']}."
        people.append(person)
    return people


def make_works(people, rng):
    """One or two works a creator, named after the creator's noun; novel, film and opera may share a name."""
    works = {}
    for person in people:
        if person["noun"] is None:
            continue
        kind = KINDS[person["calling"]]
        for adjective in rng.sample(ADJECTIVES, rng.choice([1, 1, 2])):
            name = f"The {adjective} {person['noun']}"
            title = name if kind == "novel" else f"{name} ({kind})"
            if title in works:
                continue
            year = min(person["year"] + rng.randint(25, 60), WORK_YEARS[1])
            appeared = APPEARED[person["calling"]]
            article = "an" if kind == "opera" else "a"
            text = f"{article} {kind} by {person['title']}, first {appeared} in {year}."
            work = {"title": title, "text": text, "name": name, "kind": kind, "year": year, "by": person}
            works[title] = work
            person["works"].append(work)
    return list(works.values())


def make_towns(rng):
    towns = []
    for name in TOWNS:
        river = rng.choice(RIVERS)
        year = rng.randint(*TOWN_YEARS)
        text = f"a town on the river {river}, founded in {year}."
        towns.append({"title": name, "text": text, "river": river, "year": year})
    return towns


def group_by(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def thin_out(people, rng):
    """Of LONE_CREATORS of the nouns one creator of each calling stays."""
    lone = rng.sample(NOUNS, round(LONE_CREATORS * len(NOUNS)))
    stay = {(person["noun"], person["calling"]): person for person in people if person["noun"] in lone}
    return [person for person in people if stay.get((person["noun"], person["calling"]), person) is person]


def make_world(rng, shipped=False):
    """All facts dealt anew: people, works, towns and who shares a name with whom."""
    people = make_people(rng)
    if shipped:
        people = thin_out(people, rng)
    world = {"people": people, "works": make_works(people, rng)}
    world["towns"] = {town["title"]: town for town in make_towns(rng)}
    for name in ("last", "first", "noun"):
        world[f"by_{name}"] = group_by(people, name)
    return {**world, "by_name": group_by(world["works"], "name")}


# ---------------------------------------------------------------- questions


def question(type_, text, answer, *gold):
    titles = [entity["title"] for entity in gold]
    return {"question": text, "answer": str(answer), "type": type_, "gold": titles}


def ask_person(person, rng, type_, old_spellings=None):
    """old_spellings: how often the surname is as it was spelt of old; by default in reworded questions."""
    relation = rng.choice(["year", "town", "calling"])
    name = person["first"]
    if type_ == "reworded" and relation != "town" and rng.random() < 0.5:
        name = f"the {demonym(person['town'])} {name}"
    text = rng.choice(ASKED[type_][relation])
    is_old = type_ == "reworded" if old_spellings is None else rng.random() < old_spellings
    last = old_spelling(person["last"]) if is_old else person["last"]
    return question(type_, text.format(f"{name} {last}"), person[relation], person)


def ask_work(work, rng):
    calling = work["by"]["calling"]
    if rng.random() < 0.5:
        text = f"Who was the {calling} of the {work['kind']} {work['name']}?"
        return question("one-hop", text, work["by"]["title"], work)
    text = f"When was the {work['kind']} {work['name']} first {APPEARED[calling]}?"
    return question("one-hop", text, work["year"], work)


def ask_town(town, rng):
    if rng.random() < 0.5:
        return question("one-hop", f"On which river lies {town['title']}?", town["river"], town)
    return question("one-hop", f"When was {town['title']} founded?", town["year"], town)


def ask_two_hop(work, rng):
    person = work["by"]
    whom = f"the {person['calling']} of {work['name']}"
    if rng.random() < 0.6:
        return question("two-hop", f"In which town was {whom} born?", person["town"], work, person)
    return question("two-hop", f"In which year was {whom} born?", person["year"], work, person)


def ask_comparison(one, other, rng):
    """Who was born earlier or later (ten years apart at least), one town or not, who has the calling."""
    names = f"{one['title']} or {other['title']}"
    kinds = ["same town"]
    if abs(one["year"] - other["year"]) >= 10:
        kinds += ["earlier", "later"]
    if one["calling"] != other["calling"]:
        kinds += ["calling"]
    kind = rng.choice(kinds)
    if kind == "same town":
        text = f"Were {one['title']} and {other['title']} born in the same town?"
        answer = "yes" if one["town"] == other["town"] else "no"
    elif kind == "calling":
        chosen = rng.choice([one, other])
        text = f"Who worked as {chosen['calling']}, {names}?"
        answer = chosen["title"]
    else:
        text = f"Who was born {kind}, {names}?"
        one_answers = (one["year"] < other["year"]) == (kind == "earlier")
        answer = (one if one_answers else other)["title"]
    return question("comparison", text, answer, one, other)


def other_person(person, world, rng):
    """Someone to compare with: half of the time from the same town, or "the same town?" would mean "no"."""
    same_town = [p for p in world["people"] if p["town"] == person["town"] and p is not person]
    if same_town and rng.random() < 0.3:
        return rng.choice(same_town)
    return rng.choice([p for p in world["people"] if p is not person])


def ask(type_, world, rng):
    """A question of the shipped world; the reader's lessons have more, and spellings as they come."""
    person = rng.choice(world["people"])
    work = rng.choice(world["works"])
    if type_ == "one-hop" and rng.random() < 0.1:
        return ask_town(rng.choice(list(world["towns"].values())), rng)
    if type_ in ("one-hop", "reworded"):
        return ask_person(person, rng, type_, OLD_SPELLINGS)
    if type_ == "work":
        shared = rng.random() < SHARED_NAMES
        while shared != (len(world["by_name"][work["name"]]) > 1) or (shared and work["kind"] == "novel"):
            work = rng.choice(world["works"])
        row = ask_work(work, rng)
        text = row["question"].replace(f"the {work['kind']} {work['name']}", work["name"])
        return {**row, "type": "work", "question": text}
    if type_ == "two-hop":
        return ask_two_hop(work, rng)
    return ask_comparison(person, other_person(person, world, rng), rng)


def make_questions(world, rng):
    """QUESTIONS[type] different questions of each type about the world, shuffled."""
    found = {}
    for type_, count in QUESTIONS.items():
        wanted = len(found) + count
        while len(found) < wanted:
            row = ask(type_, world, rng)
            found.setdefault(row["question"], row)
    rows = list(found.values())
    rng.shuffle(rows)
    return rows


def make_corpus(world, rng):
    entities = world["people"] + world["works"] + list(world["towns"].values())
    rng.shuffle(entities)
    return [{"title": entity["title"], "text": entity["text"]} for entity in entities]


# ---------------------------------------------------------------- tokenizer


def make_tokenizer(worlds):
    """Whole words and signs of the constants, of the worlds' texts and of questions about them.

    The fixed parts of the prompt are one token each, so that they cost one.
    """
    splitter = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "removed", invert=True)
    texts = [*FIRST_NAMES, *SURNAMES, *map(old_spelling, SURNAMES), *TOWNS, *map(demonym, TOWNS), *RIVERS]
    texts += [*ADJECTIVES, UNKNOWN, "yes", "no"]
    texts += map(str, range(TOWN_YEARS[0], WORK_YEARS[1] + 1))
    for world in worlds:
        texts += [row["title"] + ": " + row["text"] for row in make_corpus(world, random.Random(0))]
        texts += [row["question"] for row in make_questions(world, random.Random(0))]
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *sorted(words)])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = splitter
    signs = [decoders.Replace(" :", ":"), decoders.Replace("( ", "("), decoders.Replace(" )", ")")]
    core.decoder = decoders.Sequence([decoders.WordPiece("##", cleanup=True), decoders.Fuse(), *signs])
    fixed = [PROMPT.split("\n")[0], "CONTEXTS:", "QUESTION:", "ANSWER:"]
    fixed += [f"[{n}]" for n in range(1, 21)]
    core.add_tokens([AddedToken(text, normalized=False) for text in fixed])
    options = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
    options |= {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": 1024}
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **options)


# ---------------------------------------------------------------- the reader's lessons


def sample_up_to(rows, count, rng):
    return rng.sample(rows, min(count, len(rows)))


def draw_context(world, size, rng):
    """`size` paragraphs that a search might bring together: one surname, one noun, two people, one title."""
    person = rng.choice(world["people"])
    namesakes = world["by_last"][person["last"]]
    theme = rng.choice(["person", "names", "names", "work", "work", "pair"])
    if theme == "person":
        first = [person]
        more = person["works"] + [world["towns"][person["town"]]] + sample_up_to(namesakes, 4, rng)
        more += sample_up_to(world["by_first"][person["first"]], 4, rng)
    elif theme == "names":
        first = [person]
        more = namesakes + sample_up_to(world["by_first"][person["first"]], size, rng)
    elif theme == "work":
        work = rng.choice(world["works"])
        first = [work, work["by"]]
        more = world["by_name"][work["name"]] + world["by_noun"][work["by"]["noun"]]
        more = more + [w for p in sample_up_to(more, 3, rng) for w in p.get("works", [])]
    else:
        other = other_person(person, world, rng)
        first = [person, other]
        more = person["works"] + other["works"] + sample_up_to(namesakes, 2, rng)
        more = more + sample_up_to(world["by_last"][other["last"]], 2, rng)
    rng.shuffle(more)
    more += rng.sample(world["people"], size) + rng.sample(world["works"], size)
    unique = list({entity["title"]: entity for entity in first + more}.values())[:size]
    rng.shuffle(unique)  # or the reader would learn that the first paragraphs tell
    return unique


def draw_questions(world, entities, rng):
    """QUESTIONS_PER_CONTEXT questions about these paragraphs; what they do not tell is answered UNKNOWN."""
    titles = {entity["title"] for entity in entities}
    towns = [entity for entity in entities if "river" in entity]
    works = [entity for entity in entities if "by" in entity]
    people = [entity for entity in entities if "calling" in entity]
    told = [work for work in works if work["by"]["title"] in titles]
    rows = {}
    while len(rows) < QUESTIONS_PER_CONTEXT:
        known = rng.choice(people or world["people"])
        person = known
        if rng.random() < 0.35:  # a namesake, of whom the paragraphs seldom tell
            name = rng.choice(["first", "first", "last"])
            person = rng.choice(world[f"by_{name}"][known[name]])
        kind = rng.choice("one-hop reworded work town two-hop two-hop comparison".split())
        if kind in ASKED:
            new = ask_person(person, rng, kind)
        elif kind == "work" and works:
            new = ask_work(rng.choice(works), rng)
        elif kind == "town" and towns:
            new = ask_town(rng.choice(towns), rng)
        elif kind == "two-hop" and works:
            new = ask_two_hop(rng.choice(told if told and rng.random() < 0.9 else works), rng)
        elif kind == "comparison" and people and known is not people[0]:
            new = ask_comparison(*rng.sample([people[0], known], 2), rng)
        else:
            continue
        if not titles.issuperset(new["gold"]):
            if kind not in ASKED and rng.random() < 0.93:
                continue  # most questions can be answered
            new["answer"] = UNKNOWN
        rows[new["question"]] = new
    return list(rows.values())


def reader_batch(world, tokenizer, size, rng):
    """READER_BATCH contexts, each read once and followed by QUESTIONS_PER_CONTEXT questions.

    Returns ids, positions, segments and labels, each (rows, length). Segment 0 is the context, j the j-th
    question with its answer; a question sees the context and itself and its positions go on from the
    context's, so it stands exactly as in a prompt of its own.
    """
    contexts, asked, answers = [], [], []
    for _ in range(READER_BATCH):
        entities = draw_context(world, size, rng)
        texts = [PARAGRAPH.format(n=n, title=e["title"], text=e["text"]) for n, e in enumerate(entities, 1)]
        context, tail = PROMPT.format(contexts="\n".join(texts), question="|").split("|")
        contexts.append(context.removesuffix("QUESTION: "))
        for row in draw_questions(world, entities, rng):
            asked.append(f"QUESTION: {row['question']}{tail}")
            answers.append(f" {row['answer']}{tokenizer.eos_token}")
    contexts, asked, answers = (tokenizer(texts)["input_ids"] for texts in (contexts, asked, answers))
    rows = []
    for number, context in enumerate(contexts):
        ids = list(context)
        positions, segments = [*range(len(context))], [0] * len(context)
        labels = [-100] * len(context)
        for segment in range(1, QUESTIONS_PER_CONTEXT + 1):
            place = number * QUESTIONS_PER_CONTEXT + segment - 1
            new = asked[place] + answers[place]
            ids += new
            positions += range(len(context), len(context) + len(new))
            segments += [segment] * len(new)
            labels += [-100] * len(asked[place]) + answers[place]
        rows.append((ids, positions, segments, labels))
    fillers = (tokenizer.pad_token_id, 0, -1, -100)
    return [pad_right(column, filler) for column, filler in zip(zip(*rows), fillers)]


# ---------------------------------------------------------------- training


def pad_right(rows, fill):
    width = max(map(len, rows))
    return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows])


def start_as_synonyms(model, tokenizer):
    """A surname and its old spelling, a town and its demonym, start as the same word."""
    pairs = [(word, old_spelling(word)) for word in SURNAMES] + [(word, demonym(word)) for word in TOWNS]
    words, others = (tokenizer.convert_tokens_to_ids(list(column)) for column in zip(*pairs))
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[others] = weight[words]


def start_as_lookup(model):
    """Start with keys = queries (equal words look at each other) and output = transposed values (what is
    looked at is copied); and with the first layer's first head looking at the word before, so that a surname
    knows its first name. Lookup is then learnt in hundreds of steps instead of thousands."""
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.weight.copy_(attention.q_proj.weight)
            attention.o_proj.weight.copy_(attention.v_proj.weight.T)
        attention = model.model.layers[0].self_attn
        frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        for projection, angle in ((attention.q_proj, -frequency), (attention.k_proj, 0 * frequency)):
            projection.weight[:size] *= 0.1
            # a query is turned back by one place
            turned = torch.cat([angle.cos(), angle.sin()])
            projection.bias[:size] = 6 * turned


def question_mask(segments):
    """(rows, 1, length, length), True where a position may look: back, into the context or its question."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    context = (segments == 0)[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ((same | context) & causal)[:, None]


def reader_loss(model, tokenizer, world, progress, rng):
    """Cross entropy of the answers and their <eos>; contexts grow from one paragraph to eight."""
    size = rng.randint(1, min(MOST_PARAGRAPHS, 2 + int(14 * progress)))
    ids, positions, segments, labels = reader_batch(world, tokenizer, size, rng)
    hidden = model.model(
        input_ids=ids, attention_mask=question_mask(segments), position_ids=positions
    ).last_hidden_state
    answered = labels[:, 1:] != -100
    logits = model.lm_head(hidden[:, :-1][answered])  # (answer tokens, vocabulary)
    targets = labels[:, 1:][answered]
    return F.cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()


def train(model, tokenizer):
    """On other worlds, never the shipped one."""
    rng = random.Random(f"reader {SEED}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=READER_LEARNING_RATE, weight_decay=0.01, fused=True)
    for step in range(READER_STEPS):
        # A linear warm-up, then half a cosine
        warmup = max(1, min(100, READER_STEPS // 10))
        cosine = torch.cos(torch.tensor(step / READER_STEPS * torch.pi)).item()
        scale = min((step + 1) / warmup, 0.5 * (1 + cosine) + 0.01)
        optimizer.param_groups[0]["lr"] = READER_LEARNING_RATE * scale
        if step % STEPS_PER_WORLD == 0:
            world = make_world(rng)
        loss, right = reader_loss(model, tokenizer, world, step / READER_STEPS, rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == READER_STEPS - 1:
            print(
                f"step {step:5d}/{READER_STEPS}  loss {loss.item():.4f}  right {right.item():.3f}", flush=True
            )


def new_reader(tokenizer):
    torch.manual_seed(SEED)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        attention_bias=True,
        bos_token_id=None,
        **size,
        **special,
    )
    model = LlamaForCausalLM(config)
    start_as_synonyms(model, tokenizer)
    start_as_lookup(model)
    return model


# ---------------------------------------------------------------- all of it


def main():
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in ("SEED", "OUT", "READER_STEPS") or (key != "OUT" and not value.isdecimal()):
            sys.exit(f"make_rag.py takes SEED=number, OUT=folder and READER_STEPS=number, not {word!r}")
        globals()[key] = value if key == "OUT" else int(value)
    out = Path(OUT)
    out.mkdir(parents=True, exist_ok=True)

    shipped = random.Random(SEED)
    world = make_world(shipped, shipped=True)
    corpus = make_corpus(world, shipped)
    for name, rows in (("corpus", corpus), ("questions", make_questions(world, shipped))):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rng = random.Random(SEED + 1000)
    tokenizer = make_tokenizer([make_world(rng) for _ in range(3)])
    for row in corpus:
        text = row["title"] + ": " + row["text"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, text
    reader = new_reader(tokenizer)
    print(f"{reader.num_parameters():,} parameters", flush=True)
    train(reader, tokenizer)
    reader.save_pretrained(out / "reader")
    tokenizer.save_pretrained(out / "reader")


if __name__ == "__main__":
    main()
