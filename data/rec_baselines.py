"""Ranks the items for the rows of grpo/grpo_rec.py by other methods, and writes BASELINES_FILE: the best
items of each validation and test row, which grpo_rec.py scores beside its policies.

    python data/rec_baselines.py                     # data/rec/baselines.npz, which is shipped
    python data/rec_baselines.py @mine/words.txt     # the arguments that grpo_rec.py gets

popularity: the items most often targets. markov: those most often after the last item. counts: see Counts;
smoothing and decay are chosen by NDCG@10 on validation. debiased: the same counts, divided by the square root
of the item's popularity: a rule that is told that exposure misleads. sasrec: self-attention over the
history's items (1808.09781), trained with the softmax over all items; of the epochs the one with the best
NDCG@10 on validation.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

ROOT = Path(__file__).resolve().parents[1]
SMOOTHING = (1, 3, 10, 30, 100, 300)
DECAYS = (0, 0.1, 0.2, 0.4, 0.6, 0.8)
EPOCHS = 30
PATIENCE = 4  # epochs without a better NDCG@10

sys.path.insert(0, str(ROOT / "grpo"))
import grpo_rec as rec


class Counts:
    """Counts how often items followed each other in rows, on each level of codes that paths (items, levels)
    has: the node of each item, the root first. A level with few counts is smoothed by the level above,

        P_0(i) = i's share of the targets
        P_l(i | j) = (n_l(j, i) + smoothing P_{l-1}(i | j)) / (n_l(j) + smoothing)

    n_l(j, i): how often an item of j's node came before one of i's, times i's share of its node's targets. A
    score is the sum over the history of decay ** (items further back) P(i | j)."""

    def __init__(self, rows, paths, smoothing=1.0, decay=0.0):
        self.smoothing = smoothing
        self.decay = decay
        last = torch.tensor([row["history"][-1] for row in rows])
        targets = torch.tensor(rec.column(rows, "target"))
        popularity = targets.bincount(minlength=len(paths)).double()
        self.shares = popularity / len(rows)
        self.levels = []  # (node of each item, how often nodes followed each other, share within the node)
        for nodes in paths.T[1:]:
            size = int(nodes.max()) + 1
            pairs = torch.stack([nodes[last], nodes[targets]])
            ones = torch.ones(len(rows), dtype=torch.double)
            followed = torch.sparse_coo_tensor(pairs, ones, (size, size), check_invariants=True).coalesce()
            within = popularity / nodes.bincount(popularity).clamp(min=1)[nodes]
            self.levels.append((nodes, followed, within))

    def scores(self, histories):
        """Returns a score for each item, (histories, items), float64."""
        known = sorted(set().union(*histories))
        after = self.shares.expand(len(known), -1)  # P(. | j) of each j of known
        for nodes, followed, within in self.levels:
            counts = followed.index_select(0, nodes[known]).to_dense()  # (len(known), nodes)
            above = self.smoothing * after
            after = (counts[:, nodes] * within + above) / (counts.sum(1, keepdim=True) + self.smoothing)
        weights = torch.zeros(len(histories), len(self.shares)).double()
        for n, history in enumerate(histories):
            for back, item in enumerate(reversed(history)):
                weights[n, item] += self.decay**back  # 0 ** 0 is 1
        return weights[:, known] @ after


class SASRec(torch.nn.Module):
    def __init__(self, items, longest, width=64, layers=2, heads=2, dropout=0.3):
        super().__init__()
        self.items = torch.nn.Embedding(items + 1, width, padding_idx=items)
        self.places = torch.nn.Embedding(longest, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.dropout = torch.nn.Dropout(dropout)
        torch.nn.init.normal_(self.items.weight, std=0.02)
        torch.nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, histories):
        """Returns a vector after each place, (rows, T, width), of right-padded histories (rows, T)."""
        size = histories.shape[1]
        hidden = self.dropout(self.items(histories) + self.places.weight[:size])
        causal = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)
        return self.norm(self.layers(hidden, mask=causal))

    @torch.no_grad()
    def scores(self, histories):
        """Returns a score for each item, (histories, items)."""
        self.eval()
        last = torch.tensor([len(history) - 1 for history in histories])
        users = self(pad(histories, self.items.padding_idx))[torch.arange(len(last)), last]
        return users @ self.items.weight[:-1].T


def pad(rows, value):
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def train_sasrec(sequences, valid_rows, items):
    """Returns the model of the best epoch."""
    model = SASRec(items, rec.MAX_HISTORY)
    inputs = pad([sequence["items"][:-1] for sequence in sequences], items)
    targets = []
    for sequence in sequences:
        pairs = zip(sequence["items"][1:], sequence["learn"])
        targets.append([item if is_learnt else -100 for item, is_learnt in pairs])
    targets = pad(targets, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    best, waited = -1.0, 0
    for _ in range(EPOCHS):
        model.train()
        for chunk in torch.randperm(len(inputs)).split(4 * rec.SFT_BATCH_SIZE):
            logits = model(inputs[chunk]) @ model.items.weight[:-1].T
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[chunk].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reached = ndcg(model.scores, valid_rows)
        waited += 1
        if reached > best:
            best, waited = reached, 0
            weights = {key: value.clone() for key, value in model.state_dict().items()}
        if waited == PATIENCE:
            break
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


def main():
    rec.MAX_EVAL_ROWS = None  # lists of all validation rows
    rec.apply_overrides(sys.argv[1:])
    catalogue = rec.Catalogue()
    sequences, valid_rows, test_rows = rec.load_splits(catalogue)
    rows = rec.transitions(sequences)
    number = {code: place for place, code in enumerate(catalogue.vocabulary)}
    codes = torch.tensor([[number[code] for code in codes] for codes in catalogue.codes])
    paths = rec.Trie(codes, "cpu").paths
    torch.manual_seed(rec.SEED)
    grid = [Counts(rows, paths, *pair) for pair in itertools.product(SMOOTHING, DECAYS)]
    counts = max(grid, key=lambda model: ndcg(model.scores, valid_rows))
    exposure = (1 + torch.tensor(rec.column(rows, "target")).bincount(minlength=len(catalogue.items))) ** 0.5
    methods = {
        "popularity": Counts(rows, paths[:, :1]).scores,
        "markov": Counts(rows, paths[:, [0, -1]]).scores,
        "counts": counts.scores,
        "debiased": lambda histories: counts.scores(histories) / exposure,
        "sasrec": train_sasrec(sequences, valid_rows, len(catalogue.items)).scores,
    }
    histories = sorted({tuple(row["history"]) for row in valid_rows + test_rows})
    smallest = np.min_scalar_type(-len(catalogue.items))  # a type of few bytes
    arrays = {"data": np.array(rec.baseline_data())}
    arrays["histories"] = pad(histories, -1).numpy().astype(smallest)
    for name, scores_of in methods.items():
        arrays[name] = top_items(scores_of, histories).numpy().astype(smallest)
        print(f"{name:10} NDCG@10 on validation {ndcg(scores_of, valid_rows):.4f}")
    np.savez_compressed(rec.BASELINES_FILE, **arrays)
    print(f"{rec.BASELINES_FILE}: {len(histories)} histories")


if __name__ == "__main__":
    try:
        main()
    except (rec.UserError, OSError) as error:
        print(f"rec_baselines.py: {error}", file=sys.stderr)
        sys.exit(2)
