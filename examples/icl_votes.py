"""Choosing demonstrations for questions of a bank, with a reader of your own: a vote instead of a model.

Shows load_reader(). Any object will do that has answers(asked) and gold_probabilities(asked), where asked is
[(question, demonstrations)] of rows with text, answer, golds, image and vector. This one is exact, needs no
download, and is blind to the order of the demonstrations.

Data: 8,000 questions of 77 intents (Banking77, CC BY 4.0). Pools of 256 random rows, lists of 1 and 2.

Change: VoteReader, or the constants below.

    python examples/icl_votes.py [KEY=VALUE ...]    # rce_icl.py's constants
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "rce"))
import rce_icl

PRIOR_STRENGTH = 0.2  # weight of the answers' shares; a demonstration of similarity 1 has weight 1

rce_icl.TRAIN_DATASET = {"path": f"{ROOT}/data/banking77/train.csv", "type": "csv"}
rce_icl.TRAIN_DATASET |= {"input": "text", "output": "category"}
rce_icl.TEST_DATASET = {**rce_icl.TRAIN_DATASET, "path": f"{ROOT}/data/banking77/test.csv"}
rce_icl.TEST_QUESTIONS = None
rce_icl.VALIDATION_QUESTIONS = 400
rce_icl.READER = "votes"
rce_icl.SHOTS = 2
rce_icl.POOL_SIZE = 256
rce_icl.MINE_QUESTIONS = 4000
rce_icl.RCE_EPOCHS = 4
rce_icl.GRPO_EPOCHS = 2
rce_icl.WEIGHT_DECAY = 0.1
rce_icl.OUTPUT_DIR = f"{ROOT}/checkpoints/icl_votes"


class VoteReader:
    """P(answer) is its weight / the sum of all answers' weights. The weight is PRIOR_STRENGTH * its share of
    the answers of all demonstrations + the similarity of those demonstrations in the prompt that show it."""

    def __init__(self, demos):
        counts = Counter(demo["answer"] for demo in demos)
        self.prior = {answer: PRIOR_STRENGTH * count / len(demos) for answer, count in counts.items()}
        self.commonest = max(self.prior, key=self.prior.get)

    def weights(self, question, demonstrations):
        """Returns {answer: weight} of the answers shown and the commonest."""
        weights = {self.commonest: self.prior[self.commonest]}
        for demo in demonstrations:
            similarity = max(0.0, float(question["vector"] @ demo["vector"])) + 1e-3
            weights[demo["answer"]] = weights.get(demo["answer"], self.prior[demo["answer"]]) + similarity
        return weights

    def answers(self, asked):
        answers = []
        for question, demonstrations in asked:
            weights = self.weights(question, demonstrations)
            answers.append(max(weights, key=weights.get))
        return answers

    def gold_probabilities(self, asked):
        probabilities = []
        for question, demonstrations in asked:
            weights = self.weights(question, demonstrations)
            total = PRIOR_STRENGTH + sum(weights.values()) - sum(map(self.prior.get, weights))
            of_golds = 0.0
            for gold in set(question["golds"]):
                of_golds += weights.get(gold, self.prior.get(gold, 0.0))
            probabilities.append(of_golds / total)
        return probabilities


class VoteTrainer(rce_icl.ICLTrainer):
    def load_reader(self):
        return VoteReader(self.demos)


rce_icl.ICLTrainer = VoteTrainer  # what train_main() starts

if __name__ == "__main__":
    rce_icl.train_main()
