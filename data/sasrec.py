"""Trains SASRec (Kang and McAuley 2018, 1808.09781) on the rows of grpo/grpo_rec.py and writes SASREC_FILE.

    python data/sasrec.py                                    # data/rec/sasrec.npz, which is shipped
    python data/sasrec.py SASREC_FILE=mine.npz TRAIN_FILE=...      # the words that grpo_rec.py gets

Self-attention over the history's items, trained with the softmax over all items, which does better than the
paper's sampled one; of the epochs the one with the best validation NDCG@10. A score is the product of a
vector of the history and one of the item: the file has those of all items, and of the histories that are
evaluated or, with COLLABORATIVE_WEIGHT, trained on. grpo_rec.py takes it where its rows are just these.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
EPOCHS = 30
PATIENCE = 4  # epochs without a better NDCG@10


def load_script():
    spec = importlib.util.spec_from_file_location("grpo_rec", ROOT / "grpo/grpo_rec.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(main, *arguments):
    """main(grpo_rec's module, *arguments); what a user can mend is one sentence and exit code 2."""
    rec = load_script()
    try:
        main(rec, *arguments)
    except Exception as error:
        text = rec.user_message(error)
        if text is None:
            raise
        print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr)
        sys.exit(2)


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
        """A vector after each place: histories (rows, T), padded on the right, to (rows, T, width)."""
        size = histories.shape[1]
        hidden = self.dropout(self.items(histories) + self.places.weight[:size])
        causal = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)
        return self.norm(self.layers(hidden, mask=causal))

    @torch.no_grad()
    def users(self, histories):
        """A vector of each history, (histories, width)."""
        self.eval()
        found = []
        for begin in range(0, len(histories), 256):
            some = [torch.tensor(history) for history in histories[begin : begin + 256]]
            last = torch.tensor([len(history) - 1 for history in some])
            found.append(self(pad_right(some, self.items.padding_idx))[torch.arange(len(some)), last])
        return torch.cat(found)


def pad_right(rows, value):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def sequences_of(train_rows):
    """[(sequence, the places in it that are trained on)]."""
    found = {}
    for row in train_rows:
        found.setdefault(row["line"], (row["sequence"], set()))[1].add(row["at"])
    return list(found.values())


def train(rec, train_rows, valid_rows, items):
    """(the model of the best epoch, its validation NDCG@10)."""
    model = SASRec(items, rec.MAX_HISTORY)
    sequences = sequences_of(train_rows)
    inputs = pad_right([torch.tensor(sequence[:-1]) for sequence, _ in sequences], items)
    targets = []
    for sequence, asked in sequences:
        targets.append(torch.tensor([x if at in asked else -100 for at, x in enumerate(sequence)][1:]))
    targets = pad_right(targets, -100)
    histories = [row["history"] for row in valid_rows]
    # 128 sequences of the shipped rows; fewer where they are longer
    batch_size = 4 * rec.balanced_batch_size([{"learn": [True] * len(asked)} for _, asked in sequences])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    best = -1.0
    waited = 0
    for _ in range(EPOCHS):
        model.train()
        for chunk in torch.randperm(len(inputs)).split(batch_size):
            logits = model(inputs[chunk]) @ model.items.weight[:-1].T
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[chunk].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        baseline = rec.SASRec(histories, model.users(histories), model.items.weight.detach()[:-1])
        found = rec.gains(rec.top_items(baseline, valid_rows), valid_rows, 10).mean().item()
        waited += 1
        if found > best:
            best = found
            waited = 0
            weights = {key: value.clone() for key, value in model.state_dict().items()}
        if waited == PATIENCE:
            break
    model.load_state_dict(weights)
    return model, best


def main(rec, words):
    rec.apply_overrides(words)
    rec.check_constants()
    path = rec.SASREC_FILE
    if path is None:
        raise rec.UserError("SASREC_FILE = None: name the file that is to be written")
    shipped = rec.ROOT / "data/rec"
    if Path(path).resolve().parent == shipped and Path(rec.TRAIN_FILE).resolve().parent != shipped:
        raise rec.UserError(f"SASREC_FILE = {path!r} is the shipped rows': name a file of your own")
    if not Path(path).absolute().parent.is_dir():
        raise rec.UserError(f"SASREC_FILE = {path!r}: there is no folder {Path(path).parent}")
    catalogue = rec.Catalogue(print)
    train_rows, valid_rows, test_rows = rec.load_splits(catalogue, print)
    torch.manual_seed(rec.SEED)
    model, best = train(rec, train_rows, valid_rows, len(catalogue.items))
    asked = [*valid_rows, *test_rows, *(train_rows if rec.COLLABORATIVE_WEIGHT else ())]
    histories = list(dict.fromkeys(tuple(row["history"]) for row in asked))
    padded = pad_right([torch.tensor(history) for history in histories], -1)
    arrays = {
        "trained_on": rec.rows_digest(train_rows),
        "histories": padded.int().numpy(),
        "users": model.users(histories).numpy(),
        "items": model.items.weight.detach()[:-1].numpy(),
    }

    def write(tmp):
        with open(tmp, "wb") as file:  # by a name numpy would add .npz to it
            np.savez_compressed(file, **arrays)

    rec.write_atomically(Path(path), write)
    print(f"{path}: {len(histories)} histories, NDCG@10 on validation {best:.4f}")


if __name__ == "__main__":
    run(main, sys.argv[1:])
