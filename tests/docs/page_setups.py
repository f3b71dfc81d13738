"""Which set-up each page has, where its example places are here, and what can't be run.

A set-up (setups/*.py) is run in the page's own namespace before its first block, so that its
functions travel to the workers as the page's own do. A page without one begins with nothing but
`spark`, as a notebook does.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "setups"

# What a page writes -> what is meant here. The JVM has a working directory of its own, so relative
# paths are made absolute.
PLACES = {
    "s3://bucket": "file:{folder}/bucket",
    '"data/': '"{folder}/data/',
    '"models/': '"{folder}/models/',
    '"/tmp/run-7': '"{folder}/run-7',
}

# (page, first line of the block, why it can't be run). The test counts them.
NOT_RUN: list[tuple[str, str, str]] = []

SETUPS = {
    "README.md": "digits_in_parquet.py",
    "docs/explanation-consistency.md": "digits_estimator.py",
    "docs/explanation-lineage.md": "digits_estimator.py",
    "docs/explanation-strategies.md": "digits_estimator.py",
    "docs/how-to-databricks.md": "digits_estimator.py",
    "docs/how-to-from-horovod.md": "digits_estimator.py",
    "docs/how-to-from-mllib.md": "points_in_a_ring.py",
    "docs/how-to-from-torch-distributor.md": "digits_estimator.py",
    "docs/how-to-objectives-and-data.md": "digits_pictures_sentences.py",
    "docs/how-to-save-and-load.md": "mycompany.py",
    "docs/how-to-see-a-run.md": "digits_estimator.py",
    "docs/how-to-write-a-strategy.md": "digits_estimator.py",
    "docs/how-to-write-a-callback.md": "digits_estimator.py",
    "docs/how-to-write-a-checkpoint-store.md": "digits_estimator.py",
    "docs/how-to-write-a-compressor.md": "digits_estimator.py",
    "docs/how-to-write-a-tracker.md": "digits_estimator.py",
    "docs/how-to-share-a-cluster.md": "digits_estimator.py",
}
