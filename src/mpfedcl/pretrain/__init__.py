"""Central pretraining of an encoder, so that the whole chain can be made by a user."""
