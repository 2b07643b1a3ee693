"""The Python interface of `autoddl`: a function for every command, and a class for every result.

- `planning`: `plan`, `load`, `compare`; `inputs`: models and clusters as users name them, `extract`.
- `plans`: the class `Plan`; `figures`: its layers and stages; `results`: the results of its methods and of `compare`.
- `schedules`: `schedule`; `profiled`: `pipeline`, the planners of DAPPLE, Chimera and WPipe.
- `measuring`: `calibrate`, `fit`, `rank`; `training`: `train`; `catalogue`: `models`, `clusters`.
- `running`: `launch`; `jobs`: its options, and the job that they describe.
- `options`: groups of keyword arguments that several functions share; `display`: the tables of a plan, as text and HTML.
- `files`: paths and output files; `frames`: pandas DataFrames.

The package `autoddl` exports all public names, and imports each module when one of its names is first used.
"""
