"""Ranks the items for the rows of grpo/grpo_rec.py by other methods, and writes BASELINES_FILE: the best
items of each validation and test row, which grpo_rec.py scores beside its policies.

    python data/rec_baselines.py                     # data/rec/baselines.npz, which is shipped
    python data/rec_baselines.py @mine/words.txt     # the arguments that grpo_rec.py gets

popularity: the items most often targets. markov: those most often after the last item. counts: see Counts.
product: see Product. sasrec: self-attention over the history's items (1808.09781), trained with the softmax
over all items. Its items have vectors of their own, or the sum of the vectors of their codes. What can be
chosen, the epoch too, is chosen by NDCG@10 on at most CHOICE_ROWS rows of validation.
"""

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

ROOT = Path(__file__).resolve().parents[1]
SMOOTHING = (1, 10, 30, 100, 300, 1000, 3000)
DECAYS = (0, 0.1, 0.2, 0.4, 0.6, 0.8)
WEIGHTS = (0.1, 0.3, 0.6, 1.0)  # of the items before the last one
EPOCHS = 30
CHOICE_ROWS = 500

sys.path.insert(0, str(ROOT / "grpo"))
import grpo_rec as rec


class Counts:
    """Counts how often items followed each other, on each level of codes that paths (items, levels) has: the
    node of each item, the root first. A level with few counts is smoothed by the level above,

        P_0(i) = i's share of the targets
        P_l(i | j) = (n_l(j, i) + smoothing P_{l-1}(i | j)) / (n_l(j) + smoothing)

    n_l(j, i): how often an item of j's node came before one of i's, times i's share of its node's targets. A
    score is the sum over the history of decay ** (items further back) P(i | j). pairs (count, 2): an item and
    the target that followed it."""

    def __init__(self, pairs, paths, smoothing=1.0, decay=0.0):
        self.smoothing = smoothing
        self.decay = decay
        before, targets = pairs.T
        popularity = targets.bincount(minlength=len(paths)).double()
        self.shares = popularity / max(1, len(pairs))
        self.levels = []  # (node of each item, how often nodes followed each other, share within the node)
        for nodes in paths.T[1:]:
            size = int(nodes.max()) + 1
            places = torch.stack([nodes[before], nodes[targets]])
            ones = torch.ones(len(pairs), dtype=torch.double)
            followed = torch.sparse_coo_tensor(places, ones, (size, size), check_invariants=True).coalesce()
            within = popularity / nodes.bincount(popularity).clamp(min=1)[nodes]
            self.levels.append((nodes, followed, within))

    def after(self, items):
        """Returns P(. | j) for each j of a list of items, (len(items), all items), float64."""
        after = self.shares.expand(len(items), -1)
        for nodes, followed, within in self.levels:
            counts = followed.index_select(0, nodes[items]).to_dense()  # (len(items), nodes)
            above = self.smoothing * after
            after = (counts[:, nodes] * within + above) / (counts.sum(1, keepdim=True) + self.smoothing)
        return after

    def scores(self, histories):
        """Returns a score for each item, (histories, items)."""
        known = sorted(set().union(*histories))
        return item_weights(histories, known, self.decay) @ self.after(known)


class Product:
    """Multiplies what the items of a history say, as naive Bayes does: a score is

        log P(i | last item) + weight sum_j log(P(i | j earlier) / P(i))

    over the items j before the last one; last and earlier are Counts."""

    def __init__(self, last, earlier, weight):
        self.last, self.earlier, self.weight = last, earlier, weight

    def scores(self, histories):
        """Returns a score for each item, (histories, items)."""
        known = sorted(set().union(*histories))
        after_last = self.last.after(known).clamp(min=1e-9).log()
        ratios = (self.earlier.after(known).clamp(min=1e-9) / self.earlier.shares.clamp(min=1e-9)).log()
        is_last = item_weights(histories, known, 0)
        is_earlier = item_weights(histories, known, 1) - is_last
        return is_last @ after_last + self.weight * (is_earlier @ ratios)


def item_weights(histories, items, decay):
    """Returns the sum of decay ** (items further back) of each item of a list, (histories, len(items))."""
    place = {item: number for number, item in enumerate(items)}
    weights = torch.zeros(len(histories), len(items), dtype=torch.double)
    for n, history in enumerate(histories):
        for back, item in enumerate(reversed(history)):
            weights[n, place[item]] += decay**back  # 0 ** 0 is 1
    return weights


class SASRec(torch.nn.Module):
    """Reads a history and gives scores to all items. An item's vector is the sum of those of its parts: of
    itself, or of its codes. parts (items, parts), numbers from 0."""

    def __init__(self, parts, longest, width=64, layers=2, heads=2, dropout=0.1):
        super().__init__()
        size = int(parts.max()) + 1
        padding = torch.full_like(parts[:1], size)
        self.parts = torch.cat([parts, padding])  # the last item pads histories
        self.vectors = torch.nn.Embedding(size + 1, width, padding_idx=size)
        self.places = torch.nn.Embedding(longest, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.dropout = torch.nn.Dropout(dropout)
        torch.nn.init.normal_(self.vectors.weight[:-1], std=0.05)
        torch.nn.init.normal_(self.places.weight, std=0.05)

    def forward(self, histories):
        """Returns scores of all items after each place, (rows, T, items), of right-padded histories (rows,
        T)."""
        size = histories.shape[1]
        items = self.vectors(self.parts).sum(1)  # (items + 1, width)
        hidden = self.dropout(items[histories] + self.places.weight[:size])
        causal = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)
        return self.norm(self.layers(hidden, mask=causal)) @ items[:-1].T

    @torch.no_grad()
    def scores(self, histories):
        """Returns a score for each item, (histories, items)."""
        self.eval()
        last = torch.tensor([len(history) - 1 for history in histories])
        return self(pad(histories, len(self.parts) - 1))[torch.arange(len(last)), last]


def pad(rows, value):
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def train_sasrec(sequences, valid_rows, parts, dropout):
    """Returns the model of the best epoch."""
    model = SASRec(parts, rec.MAX_HISTORY, dropout=dropout)
    inputs = pad([sequence["items"][:-1] for sequence in sequences], len(parts))
    targets = []
    for sequence in sequences:
        pairs = zip(sequence["items"][1:], sequence["learn"])
        targets.append([item if is_learnt else -100 for item, is_learnt in pairs])
    targets = pad(targets, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    batch_size = 2 * rec.SFT_BATCH_SIZE
    steps = EPOCHS * math.ceil(len(inputs) / batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best = -1.0
    for _ in range(EPOCHS):
        model.train()
        for chunk in torch.randperm(len(inputs)).split(batch_size):
            logits = model(inputs[chunk]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets[chunk].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        reached = ndcg(model.scores, valid_rows)
        if reached > best:
            best = reached
            weights = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(weights)
    return model


def top_items(scores_of, histories):
    """Returns the best items after each history, (histories, as many as the figures need). scores_of gives a
    score for each item, (histories, items)."""
    lists = []
    count = max(20, rec.GROUP_SIZE)
    for first in range(0, len(histories), 512):
        scores = scores_of(histories[first : first + 512])
        lists.append(scores.sort(dim=1, descending=True, stable=True).indices[:, :count])
    return torch.cat(lists)


def ndcg(scores_of, rows):
    return rec.gains(top_items(scores_of, rec.column(rows, "history")), rows, 10).mean().item()


def best_of(methods, valid_rows):
    return max(methods, key=lambda method: ndcg(method.scores, valid_rows))


def train_methods(catalogue, sequences, valid_rows):
    """Returns {name: a function from histories to a score for each item, (histories, items)}."""
    valid_rows = valid_rows[:: math.ceil(len(valid_rows) / CHOICE_ROWS)]
    rows = rec.transitions(sequences)
    number = {code: place for place, code in enumerate(catalogue.vocabulary)}
    codes = torch.tensor([[number[code] for code in codes] for codes in catalogue.codes])
    paths = rec.Trie(codes, "cpu").paths
    pairs = torch.tensor([(row["history"][-1], row["target"]) for row in rows])
    earlier_pairs = [(item, row["target"]) for row in rows for item in row["history"][:-1]]
    earlier_pairs = torch.tensor(earlier_pairs, dtype=torch.long).view(-1, 2)
    counts = best_of((Counts(pairs, paths, *x) for x in itertools.product(SMOOTHING, DECAYS)), valid_rows)
    last = [Counts(pairs, paths, smoothing) for smoothing in SMOOTHING]
    earlier = [Counts(earlier_pairs, paths, smoothing) for smoothing in SMOOTHING]
    products = (Product(*x) for x in itertools.product(last, earlier, WEIGHTS))
    own = torch.arange(len(codes)).unsqueeze(1)
    sasrecs = [train_sasrec(sequences, valid_rows, *x) for x in ((codes, 0.1), (own, 0.3))]
    methods = {
        "popularity": Counts(pairs, paths[:, :1]),
        "markov": Counts(pairs, paths[:, [0, -1]]),
        "counts": counts,
        "product": best_of(products, valid_rows),
        "sasrec": best_of(sasrecs, valid_rows),
    }
    return {name: method.scores for name, method in methods.items()}


def main():
    rec.MAX_EVAL_ROWS = None  # lists of all validation rows
    rec.apply_overrides(sys.argv[1:])
    catalogue = rec.Catalogue()
    sequences, valid_rows, test_rows = rec.load_splits(catalogue)
    torch.manual_seed(rec.SEED)
    methods = train_methods(catalogue, sequences, valid_rows)
    histories = sorted({tuple(row["history"]) for row in valid_rows + test_rows})
    smallest = np.min_scalar_type(-len(catalogue.items))  # a type of few bytes
    arrays = {"data": np.array(rec.baseline_data())}
    arrays["histories"] = pad(histories, -1).numpy().astype(smallest)
    for name, scores_of in methods.items():
        arrays[name] = top_items(scores_of, histories).numpy().astype(smallest)
        print(f"{name:12} NDCG@10 on validation {ndcg(scores_of, valid_rows):.4f}")
    np.savez_compressed(rec.BASELINES_FILE, **arrays)
    print(f"{rec.BASELINES_FILE}: {len(histories)} histories")


if __name__ == "__main__":
    try:
        main()
    except (rec.UserError, OSError) as error:
        print(f"rec_baselines.py: {error}", file=sys.stderr)
        sys.exit(2)
