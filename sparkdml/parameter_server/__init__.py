"""The parameter server: the strategy, its workers, the servers, and what users build on them."""
