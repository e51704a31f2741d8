"""More rewards for lists of items: semantic, collaborative, diversity (generative recommendation, GRPO).

Shows how a reward that needs numbers, or the whole list of a history, is added: compute_rewards() is
overridden.
- semantic: cosine of the item's and the target's titles (TF-IDF)
- collaborative: the score of SASRec, which data/rec_baselines.py trains in half a minute, scaled to 0 to 1
  within the list
- diversity: the share of the list's other items that have another first code, the broadest group of
  INDEX_FILE

Change: the WEIGHTS, and list_rewards(). Look at coverage@10 beside ndcg@10 in logs/metrics.jsonl.

    python examples/rec_rewards.py [KEY=VALUE ...]    # grpo_rec.py's constants
"""

import sys
from pathlib import Path

import torch
from sklearn.feature_extraction.text import TfidfVectorizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
import rec_baselines
from rec_baselines import rec

WEIGHTS = {"semantic": 0.3, "collaborative": 0.3, "diversity": 0.3}
rec.OUTPUT_DIR = f"{rec.ROOT}/checkpoints/rec_rewards"


class Trainer(rec.RecTrainer):
    def load_data(self):
        super().load_data()
        vectors = TfidfVectorizer(min_df=2).fit_transform(self.catalogue.titles).toarray()
        self.vectors = torch.tensor(vectors, dtype=torch.float32)  # (items, words), of length 1
        sequences, valid_rows, _ = rec.load_splits(self.catalogue)
        torch.manual_seed(rec.SEED)
        codes = self.trie.codes.cpu()
        self.sasrec = rec_baselines.train_sasrec(sequences, valid_rows, codes, dropout=0.1)

    def list_rewards(self, rows, items):
        """Returns {name: rewards (rows, G)} of lists of items (rows, G)."""
        targets = torch.tensor(rec.column(rows, "target"))
        semantic = (self.vectors[items] * self.vectors[targets].unsqueeze(1)).sum(2)
        scores = self.sasrec.scores(rec.column(rows, "history")).gather(1, items)
        lowest = scores.amin(1, keepdim=True)
        collaborative = (scores - lowest) / (scores.amax(1, keepdim=True) - lowest).clamp(min=1e-6)
        first = self.trie.codes.cpu()[items][:, :, 0]  # (rows, G)
        is_other = (first.unsqueeze(2) != first.unsqueeze(1)).float()  # (rows, G, G)
        diversity = is_other.sum(2) / (items.shape[1] - 1)
        return {"semantic": semantic, "collaborative": collaborative, "diversity": diversity}

    def compute_rewards(self, rows, items):
        scores, parts = super().compute_rewards(rows, items)
        for name, rewards in self.list_rewards(rows, items.cpu()).items():
            parts[name] = rewards
            scores = scores + WEIGHTS[name] * rewards.to(scores.device)
        return scores, parts


if __name__ == "__main__":
    rec.RecTrainer = Trainer
    rec.train_main()
