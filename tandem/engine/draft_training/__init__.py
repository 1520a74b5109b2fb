"""Training of Medusa and EAGLE heads on outputs of the model itself."""
