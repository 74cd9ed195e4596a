//! Writes a line to a stream and reads it back.
//!
//! `cargo run -p client --features face --example hello -- <address> <ca.pem>`
#![expect(clippy::print_stdout, reason = "an example talks to people")]

use client::{Client, ConnectOptions, Error};
use common::{Code, Version};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (address, ca) = (args.next().ok_or("address?")?, args.next().ok_or("ca?")?);
    let client = Client::connect([address], ConnectOptions::new(ca)).await?;

    let stream = match client.create_stream("hello").await {
        Err(error) if error.code() == Code::StreamExists => client.find_stream("hello").await?,
        created => Some(created?),
    };
    let stream = stream.ok_or("somebody has removed the stream")?;

    let mut transaction = client.transaction();
    transaction.append(stream, "hello, log").put(stream, "greeting", "hello");
    let committed = transaction.commit().await?;
    println!("committed at {}, offsets {:?}", committed.position, committed.offsets);

    let mut pull = client.pull([stream], Version::ZERO).await?;
    let mut through = Version::ZERO;
    while through < committed.position.version {
        let pulled = pull.next_until(committed.position.version).await?;
        for record in
            pulled.batches.iter().map(|batch| batch.records()).collect::<Result<Vec<_>, Error>>()?
        {
            println!("{record:?}");
        }
        through = pulled.through;
    }
    client.close().await;
    Ok(())
}
