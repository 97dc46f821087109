"""A module becomes stages: by position, by replaying its own forward, or by torch.export.

cut, cut_options        which way is taken, and what the user says of it
by_position             lists of stage modules, and `nn.Sequential`
replay/                 the model's own forward on every stage, with ghosts for other stages' units
export/                 the graph that torch.export captures
balance/                what the pieces weigh, and the best places to cut
part, staged_model      what every way of cutting gives: a part for each stage, and what crosses between them
stage_shares            doubts about a cut that nobody would ask for

original/               the user's own model beside its stages: followed, let go of on other ranks, replaced
lazy                    models that are built without values
declared_skips          values that layers of an `nn.Sequential` hand to layers further on
shared_layers           layers that several stages have
transformers_models     what models of transformers need

run_kind                which runs of a model's code count; layers ask
random_states           states of generators, read and set where several threads use them
names, lru_cache, moved     dotted names; what was found out about recent kinds of microbatches; a module elsewhere
"""
