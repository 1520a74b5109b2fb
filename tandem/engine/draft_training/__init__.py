"""Trains Medusa and EAGLE heads on outputs of the model."""
