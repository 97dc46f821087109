"""A module becomes stages: by position, by replaying its own forward, or by torch.export.

cut, cut_options        which way is taken, and what the user says of it
by_position             lists of stage modules, and `nn.Sequential`
replay/                 the model's own forward on every stage, with ghosts for other stages' units
export/                 the graph that torch.export captures
balance/                what the pieces weigh, and the best places to cut
part, staged_model      what every way of cutting gives: a part for each stage, and what crosses between them
original/               the user's own model beside its stages: followed, let go of on other ranks, replaced
lazy                    models that are built without values
"""
