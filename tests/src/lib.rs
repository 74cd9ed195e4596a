//! End-to-end tests and the rules of the tree. There is nothing but tests here.
#![forbid(unsafe_code)]
