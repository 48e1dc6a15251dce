"""The recipe's section on drift: the differences between new rows and validation rows that matter."""

from __future__ import annotations

from pydantic import Field

from training.recipe.section import Section


class Drift(Section):
    """The differences between new rows and the version's validation rows that matter to drift reports."""

    cohens_w: float = Field(default=0.1, ge=0, lt=1)
    """For categories, such as predicted labels: Cohen's w. For two equally frequent labels it is the difference of
    their shares."""
    distance: float = Field(default=0.1, ge=0, lt=1)
    """For numbers, such as confidences and lengths: the Kolmogorov-Smirnov distance, the largest difference of the
    shares of rows below any number."""
    auc: float = Field(default=0.55, ge=0.5, lt=1)
    """For words and embeddings: the held-out AUC of a classifier that tells new rows from validation rows. If a share s
    of the new rows can be told from all others, it is 0.5 + s / 2."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of all reports on a version together: at 0.95, the chance that any of them is not steady without a
    shift is at most 5 %. Each later look at new rows needs stronger evidence."""
    min_rows: int = Field(default=100, ge=20)
    """With fewer rows on either side, nothing is compared."""
    max_rows: int = Field(default=2000, ge=20)
    """Rows that are observed on either side; of more rows, so many are drawn at random."""
