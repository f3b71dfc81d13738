"""`points`: x, y, and whether they lie inside a ring."""

import numpy as np
import pandas as pd

dice = np.random.default_rng(7)
x, y = dice.uniform(-1, 1, (2, 600))
inside = (x**2 + y**2 < 0.5).astype("float64")
points = spark.createDataFrame(pd.DataFrame({"x": x, "y": y, "label": inside})).cache()  # noqa: F821
