"""data/digits: features array<float>, label bigint."""

import os

import pandas as pd
from sklearn.datasets import load_digits

digits = load_digits()
os.makedirs("data/digits")
pd.DataFrame(
    {"features": list((digits.data[:600] / 16).astype("float32")), "label": digits.target[:600]}
).to_parquet("data/digits/part-0.parquet")
