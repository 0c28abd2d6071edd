"""`python -m grpo_roc view RUN`: a page that shows a run's curves and rollouts, also while it goes on. Needs no torch."""
