"""The checks of rows by name, and the level of each unless `data.checks` sets another."""

from __future__ import annotations

from typing import Literal

Level = Literal["error", "warning", "ignore"]

LEVELS: dict[str, Level] = {
    # Found by the readers, row by row:
    "encoding": "error",  # bytes that are no text
    "ragged": "error",  # more or fewer fields than the header
    "malformed": "error",  # no JSON, no mapping, a name twice in an object, half a character
    "type": "error",  # a value of another type than its column's, or that cannot be cast
    "header_row": "warning",  # a header of CSV that looks like data, or a row that repeats it, which is left out
    "stray_quotes": "warning",  # quotation marks of CSV that are removed although they may belong to the text
    "line_breaks": "warning",  # line breaks within a quoted field of CSV: a text of several lines, or swallowed rows
    "merged_rows": "error",  # rows of CSV that a stray or unclosed quotation mark swallows
    "thousands": "warning",  # numbers as texts in which a point may separate thousands: `2.155` next to `6`
    "iob1": "warning",  # a CoNLL file with tags in IOB1, which are read as IOB2
    "comment_lines": "warning",  # lines such as `# doc 7` before a sentence of CoNLL, read as the word # with a tag
    # Found here:
    "blank_text": "error",
    "long_text": "error",
    "missing_label": "error",
    "garbled_text": "warning",
    "missing_image": "error",  # a path of an image at which there is none, or that leads out of the folder
    "unreadable_image": "error",  # no image by its content, a damaged one, or one of a format that is not read
    "animated_image": "error",  # more than one frame
    "huge_image": "error",  # more pixels than a photograph has: they would fill the memory
    "converted_image": "warning",  # an image that is turned upright, or whose colors are converted to RGB
    "no_rows": "error",
    "empty_file": "warning",
    "unknown_label": "error",
    "single_label": "error",
    "label_per_row": "error",
    "absent_label": "warning",
    "mixed_labels": "warning",
    "float_labels": "warning",
    "broken_label": "warning",
    "listed_labels": "warning",
    "similar_labels": "warning",
    "missing_word": "warning",
    "duplicates": "warning",
    "conflicting_labels": "warning",
    "shared_rows": "warning",
    "near_duplicates": "ignore",
    "group_like": "warning",
    "time_like": "warning",
    "missing_time": "error",  # rows without a value in the column of data.split, by: time
    "missing_group": "warning",  # rows without a value in the column of data.split, by: group
    "shared_groups": "warning",
    "unmatched_corrections": "warning",  # decisions of data.corrections about rows that are not in train, or changed
    # Found between the sets of a mixture:
    "disjoint_labels": "error",
    "different_labels": "warning",
    # Found by comparing with the rows of a teacher:
    "teacher_rows": "warning",  # evaluated rows that training.teacher was trained on
    # Found by the model's chat template, and when texts become tokens:
    "refused_by_template": "error",  # conversations that the chat template cannot write
    "truncated": "warning",  # texts of more tokens than tokens.max_length, which are cut
}
"""The level of each check unless `data.checks` sets another: an error ends the run, a warning is reported."""

REFUSED_BY_TEMPLATE = "refused_by_template"
"""At error, tokenize refuses such rows. At another level, load_data renders each row and leaves these out."""

IMAGE_CHECKS = ("unreadable_image", "animated_image", "huge_image")
"""Checks of an image's content."""

TEACHER_ROWS = "teacher_rows"
OF_LATER_STAGES = ("truncated", TEACHER_ROWS)
"""Checks that load_data has no part in."""

ALWAYS_ERRORS = ("no_rows", "single_label")
"""Checks that the recipe cannot change: without them nothing can be trained or evaluated."""
