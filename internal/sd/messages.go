package sd

import "abfleet/internal/audit"

// Events of the service itself, beside those of package audit.
const (
	ServiceStarted  audit.Type = "service.started"
	ServiceStopping audit.Type = "service.stopping"
	ServiceFailed   audit.Type = "service.failed"
	ServiceIdle     audit.Type = "service.idle"
)

// messageIDs are the journal's MESSAGE_ID of every event. They are constants of
// the public interface: journalctl MESSAGE_ID=... and message catalogs rely on
// them. New events get a new random one (systemd-id128 new).
var messageIDs = map[audit.Type]string{
	audit.IdentityCreated:    "e0654da06fab469893c1a4196188d80f",
	audit.IdentityRenamed:    "67182d053adf4caca8ca4b31c52181ca",
	audit.IdentityDeleted:    "e04002c3366e42588478395d63219f4a",
	audit.IdentityLimited:    "2565b43514a04669a05bbd0b95f7b58a",
	audit.LoginStarted:       "598a4f15b4ab45e997ecd92da4ae32bf",
	audit.LoginStartFailed:   "dedf942755f3478b8127a490eb5715fb",
	audit.LoginStopped:       "051f7f3131ff4c2ca653470ef479ab9c",
	audit.LoginEnded:         "c309bd279bb84b18931cb7df9f5e1aad",
	audit.LoginAdopted:       "e625d611d2c14754864f5e3bec0e6bab",
	audit.SnapshotSaved:      "e8202f2fb04243ea92c1fc7391290992",
	audit.SnapshotFailed:     "135c5a468f3a4a65bc75c17a6c5f48ac",
	audit.BindingCreated:     "527aa25754bb4acda381c7460c725b76",
	audit.BindingSwitched:    "13dd599ca81f4d7cbc4924a932e42430",
	audit.SwitchUndone:       "97a5a4ded752477f9920f7a9ab3125de",
	audit.BindingReleased:    "3ec5c90348274d8297092adf561a11ce",
	audit.ReleaseUndone:      "768192f1dc5b422c9a4b4885e21f6319",
	audit.SessionStarted:     "b9bfb6712dbe4fe0a02aa41ebf60c7b0",
	audit.SessionStartFailed: "dcf45e3d03d94c799207e5d9d694eb76",
	audit.SessionStopped:     "ce59c38688c54469a731f160a4212dda",
	audit.SessionEnded:       "eed2725cda114198971f72845ab3b41a",
	audit.SessionAdopted:     "c2643bdb15d4431eab64e22ef5fe128d",
	audit.ProfileDiscarded:   "49520c4a251240ba8ffb6bf7d28e5782",
	audit.RuntimeUnverified:  "eec3936e54fa438eadac0e66e6623ed7",
	audit.RuntimeCleaned:     "52945c07676b430b8c8d30dc8a06fcbd",
	audit.RuntimeBroken:      "c8fa51fa2a284a1b87cb8c01b1587827",
	audit.RuntimeQuarantined: "f14515dc2e654fa9bf95f0237703d072",
	audit.RuntimeRecovered:   "a2b0becd59ab4a22ad2e9e1aa3c68967",
	audit.StateCopied:        "363be5c09aad48799c660aec19297f4d",

	ServiceStarted:  "14eaecdaefbd407886b531a5452f703e",
	ServiceStopping: "c6069e0b598b49138a9aa471b8250943",
	ServiceFailed:   "d771a7fb9c294d5ead267048e4bb80dc",
	ServiceIdle:     "bdd88152c4b34eff9b0741fa80b8e8ca",
}

// MessageID returns the MESSAGE_ID of an event, "" for one that has none.
func MessageID(event string) string { return messageIDs[audit.Type(event)] }
