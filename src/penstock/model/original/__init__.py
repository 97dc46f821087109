"""The user's own model beside its stages: what is set on it, what is away on other ranks, what was replaced."""
