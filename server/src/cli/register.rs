//! Which register: options that several verbs share.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use common::quic::tls::Identity;

use super::exit::Failure;
use crate::definition::Definition;
use crate::register::{
    CLUSTER_NAME, RegisterOptions, RegisterTls, RegisterUrl, RegisterUrlError, Secret,
};

/// The environment variable that says where the register is.
pub(crate) const REGISTER_VARIABLE: &str = "MILLRACE_REGISTER";
/// The environment variable that holds the password.
pub(crate) const PASSWORD_VARIABLE: &str = "MILLRACE_REGISTER_PASSWORD";

/// Examples for `--help`.
pub(crate) const EXAMPLES: &str =
    "  millrace serve --dir ./data --register postgres://millrace@db1,db2/log \\
      --register-password-file ./password --register-tls-ca ./ca.pem
  MILLRACE_REGISTER_PASSWORD=... millrace serve --dir ./data --cluster-name blue \\
      --register etcd://millrace@etcd1:2379,etcd2:2379/millrace";

/// Where the register is.
#[derive(Args, Clone, Debug)]
pub(crate) struct RegisterArgs {
    /// Where the cluster's register is: file (in the data directory, for one node), file:///PATH (shared by
    /// the nodes of one machine), postgres://USER@HOST,HOST/DATABASE or
    /// etcd://USER@HOST:PORT,HOST:PORT/PREFIX. A password may follow the user after a colon, but others can
    /// read a command line.
    #[arg(
        long,
        value_name = "URL",
        default_value = "file",
        hide_default_value = true,
        env = REGISTER_VARIABLE,
        hide_env_values = true
    )]
    register: Secret,
    /// A file that holds the password of the register's user. Without it the environment variable
    /// MILLRACE_REGISTER_PASSWORD does.
    #[arg(long, value_name = "FILE")]
    register_password_file: Option<PathBuf>,
    /// The CA that the register's server is verified by, PEM: turns TLS on.
    #[arg(long, value_name = "FILE")]
    register_tls_ca: Option<PathBuf>,
    /// A client certificate for the register, PEM.
    #[arg(long, value_name = "FILE", requires_all = ["register_tls_ca", "register_tls_key"])]
    register_tls_cert: Option<PathBuf>,
    /// Its key, PEM.
    #[arg(long, value_name = "FILE", requires = "register_tls_cert")]
    register_tls_key: Option<PathBuf>,
    /// The cluster's name in the register: clusters that share a PostgreSQL or etcd differ in it.
    #[arg(long, value_name = "NAME", default_value = CLUSTER_NAME)]
    cluster_name: String,
}

impl RegisterArgs {
    /// The same, checked, with the password at hand.
    ///
    /// # Errors
    /// A failure of usage that does not repeat the URL.
    pub(crate) fn options(&self) -> Result<RegisterOptions> {
        let url = self.register.reveal().parse();
        let url = url
            .map_err(|error: RegisterUrlError| Failure::usage(format!("register_url: {error}")))?;
        let cluster = &self.cluster_name;
        if cluster.is_empty() || cluster.contains(['/', '\0']) {
            return Err(Failure::usage(
                "register_url: a cluster's name is not empty and has no slash",
            )
            .into());
        }
        self.at(url, cluster)
    }

    /// The register that a cluster's definition names, reached with these credentials.
    ///
    /// # Errors
    /// A failure of usage, also when these options name another register.
    pub(crate) fn options_of(&self, definition: &Definition) -> Result<RegisterOptions> {
        let names_one = self.register.reveal() != "file" || self.cluster_name != CLUSTER_NAME;
        if names_one {
            let what = "cluster_conflict: the definition names the register and the cluster: \
                without --register, MILLRACE_REGISTER and --cluster-name";
            return Err(Failure::usage(what).into());
        }
        self.at(definition.register.clone(), &definition.cluster)
    }

    fn at(&self, url: RegisterUrl, cluster: &str) -> Result<RegisterOptions> {
        let has_server_options =
            self.register_tls_ca.is_some() || self.register_password_file.is_some();
        let is_file = matches!(url, RegisterUrl::File | RegisterUrl::SharedFile(_));
        if is_file && has_server_options {
            let what = "register_url: a file has no password and no TLS";
            return Err(Failure::usage(what).into());
        }
        let files = self.register_tls_cert.clone().zip(self.register_tls_key.clone());
        let identity = files.map(|(certificate, key)| Identity { certificate, key });
        let tls = self.register_tls_ca.clone().map(|ca| RegisterTls { ca, identity });
        Ok(RegisterOptions { url, cluster: cluster.to_owned(), password: self.password()?, tls })
    }

    /// The file's, or the environment's.
    fn password(&self) -> Result<Option<Secret>> {
        let Some(path) = &self.register_password_file else {
            return Ok(std::env::var(PASSWORD_VARIABLE).ok().map(Secret::from));
        };
        let text = std::fs::read_to_string(path).map_err(|error| {
            Failure::usage(format!("register_password: {}: {error}", path.display()))
        })?;
        Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned().into()))
    }
}
