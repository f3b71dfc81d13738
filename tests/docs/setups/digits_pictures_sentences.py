"""`df` with digits, `pictures` with the same as PNGs, `sentences` of different lengths."""

import io

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
images, labels = digits.images[:300], digits.target[:300]


def to_png(image):
    file = io.BytesIO()
    Image.fromarray((image * 15).astype("uint8")).save(file, "png")
    return file.getvalue()


features = list((images.reshape(-1, 64) / 16).astype("float32"))
df = spark.createDataFrame(  # noqa: F821
    pd.DataFrame({"features": features, "label": labels})
).cache()
pictures = spark.createDataFrame(  # noqa: F821
    pd.DataFrame({"png": [to_png(image) for image in images], "label": labels})
).cache()
dice = np.random.default_rng(7)
tokens = [dice.integers(1, 100, dice.integers(1, 12)).tolist() for _ in range(200)]
sentences = spark.createDataFrame(  # noqa: F821
    [(row, int(row[0] > 50)) for row in tokens], "tokens array<bigint>, label bigint"
).cache()
