def solve_milp(*a, **k):
    raise NotImplementedError


def milp_least_memory(*a):
    raise NotImplementedError
