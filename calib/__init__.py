"""Calibration: measuring a real system, and fitting the parameters of the cost model to it.

- `measurements`, `nccl`: samples, the CSV files that hold them, the output of nccl-tests.
- `campaign`: a calibration run, on local ranks or inside a job; `settings`, `measure` and `operations`: what its ranks time.
- `forms`, `robust`, `fit`, `device`: the formulas, robust non-negative least squares, model selection, intervals.
- `clusterfile`: the cluster document of a fit; `pictures`: plots of measured points and fitted curves.
- `trust`: the probability that a plan is the best one, given the uncertainty of the parameters; `stageusage`: the counts of a step.
- `candidates`, `ranked`, `ranking`: predicted against measured times of strategies that run on ranks (`replay`).

`measure`, `operations` and `replay` run on OneFlow ranks.  The others work without OneFlow.  This module imports nothing eagerly.
"""
