"""Load tests and benchmarks of the service. They run from a checkout and are not installed; docs/performance.md explains each.

bench/      speed beside other ways to run programs, two commits in pairs, the path without programs
load/       users by locust, bursts
chaos/      faults under load, one by one and as a soak
planner/    how many machines a load needs
support/    shared: workload, processes, Redis servers, CPU meters, results
"""
