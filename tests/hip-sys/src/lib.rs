//! Nothing: the check is a test.
