"""`penstock doctor`: does training as a pipeline work on this machine, with its devices and its backend?"""
