"""What `autoddl` offers to Python: every command as a function, and its result as a value that shows itself.

- `planning`: `plan`, `load`, `compare`; `inputs`: models and clusters as users name them, `extract`.
- `plans`: `Plan`; `figures`: its layers and stages; `results`: what its methods and `compare` return.
- `schedules`: `schedule`; `profiled`: `pipeline`, the papers' planners.
- `measuring`: `calibrate`, `fit`, `rank`; `training`: `train`; `running`: `launch`; `catalogue`: `models`, `clusters`.
- `display`: the tables of a plan, as text and HTML.

The package `autoddl` offers all of it flat, and imports each module when one of its names is asked for.
"""
