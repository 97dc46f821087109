"""A user's own check: does the pipeline compute what the plain model computes?"""
