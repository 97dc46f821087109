"""The processes of a training run: started, met, watched and stopped."""
