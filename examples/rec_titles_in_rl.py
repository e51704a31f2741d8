"""Items asked for by their titles in GRPO as well, not in SFT alone (generative recommendation).

Shows how rows come into GRPO: it trains on every row that has the key "history". TITLE_ROWS adds rows whose
prompt is an item's title and whose target is that item. They have no history, so SFT alone trains on them.
Here they get an empty one, and GRPO samples items for titles, too. A reward that reads the history does not
suit them. So VALUE_WEIGHT is 0, and the logged target is the reward (RULE_WEIGHT; RANKING_WEIGHT suits as
well, COLLABORATIVE_WEIGHT does not).

Change: title_rows(), for rows of your own: {"id", "ids" of the prompt, "target", "history"}.

    python examples/rec_titles_in_rl.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B [KEY=VALUE ...]    # grpo_rec.py's
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo_rec


class TitlePrompter(grpo_rec.Prompter):
    def title_rows(self, train_rows, log):
        """Returns the rows of titles, each with a history."""
        rows = super().title_rows(train_rows, log)
        return [{"history": [], **row} for row in rows]


grpo_rec.Prompter = TitlePrompter
grpo_rec.TITLE_ROWS = 1.0
grpo_rec.VALUE_WEIGHT = 0.0
grpo_rec.VALUES_FILE = None
grpo_rec.OUTPUT_DIR = f"{grpo_rec.ROOT}/checkpoints/rec_titles_in_rl"

if __name__ == "__main__":
    grpo_rec.train_main()
