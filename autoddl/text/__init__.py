"""Results as text, as the commands print them: plans, comparisons, explanations, verifications, fits and others.

- `tables`: `Text` (sections of lines and tables), `Table`, `Column`; the only module that computes widths.
- `plans`: a plan, with a pipeline or without.
- `comparison`, `difference`, `explanation`, `graphs`, `trust`, `verification`: one module for each kind of result.
- `fits`, `rankings`: results of a calibration.
- `pipelines`: plans of the papers' planners.
- `runs`: schedules and trainings.
- `catalogue`: the built-in models and clusters.
- `layers`: names, strategies and layouts of layers, for the tables of all modules.

The functions ``..._text`` return a `Text`: ``str(text)`` has all columns, ``text.fitted(80)`` fits 80 columns.  The functions
``..._section`` return a section of one.  The columns of a table are defined in the module of the table.  No module that plans,
prices or runs imports this package.
"""
