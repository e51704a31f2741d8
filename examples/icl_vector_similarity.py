"""Wrong answers graded by how near they are to the gold ones, by vectors (choosing demonstrations, RCE).

Shows a mark of your own for mined lists. With REWARD_MODE = "hard_plus_gtprob_plus_rel" a wrong answer earns
a tenth of its relevance, 0 to 1, which rce_icl.py takes from common words: a synonym earns nothing. Here it
is the largest cosine of the answer's vector with a gold answer's. A right answer's relevance earns nothing.

Change: similarity(). EMBEDDING decides the vectors. The default, TF-IDF, knows words but no synonyms; a
sentence model such as sentence-transformers/all-MiniLM-L6-v2 knows both. Marks are kept with the mined
lists, so a change needs RESUME=no.

    python examples/icl_vector_similarity.py [KEY=VALUE ...]    # minutes on one core; rce_icl.py's constants
"""

import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rce"))
import rce_icl
import torch


class SimilarityMiner(rce_icl.Miner):
    """Marks answers as Miner does, but for their relevance."""

    def __init__(self, corpus, policy, reader):
        super().__init__(corpus, policy, reader)
        with torch.random.fork_rng():  # a model may draw weights that its files lack
            self.embedder = rce_icl.make_embedder(corpus.demos, corpus.device)
        self.similarity = cache(self.similarity)

    def similarity(self, answer, golds):
        """Returns the largest cosine of an answer with its gold answers, 0 to 1."""
        rows = []
        for text in (answer, *golds):
            rows.append({"text": text.replace("_", " "), "image": None})
        vectors = rce_icl.embed(self.embedder, rows)
        return min(1.0, max(0.0, float((vectors[1:] @ vectors[0]).max())))

    def verify(self, groups, which="candidates"):
        super().verify(groups, which)
        for group in groups:
            for candidate in rce_icl.usable(group.candidates):
                candidate["relevance"] = self.similarity(candidate["text"], tuple(group.query["golds"]))


class SimilarityTrainer(rce_icl.ICLTrainer):
    def __init__(self, resume_from_checkpoint=None):
        super().__init__(resume_from_checkpoint)
        self.miner = SimilarityMiner(self.corpus, self.policy, self.reader)


rce_icl.REWARD_MODE = "hard_plus_gtprob_plus_rel"
rce_icl.OUTPUT_DIR = f"{rce_icl.ROOT}/checkpoints/icl_vector_similarity"

if __name__ == "__main__":
    rce_icl.run_main(SimilarityTrainer)
